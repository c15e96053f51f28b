"""The language: formats, vTensors, ops, the dispatcher, graphs, flows and their registry (torch and stdlib only)."""
