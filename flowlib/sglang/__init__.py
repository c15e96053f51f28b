"""flowlib as a plugin of stock SGLang.

The package is found through the entry-point group ``sglang.srt.plugins``; SGLang calls :func:`register` in every
process that it starts. Nothing here imports SGLang until then, and without ``--flow`` a server behaves as if flowlib
were absent.

    sglang serve --model-path MODEL --flow gqa_quest_sparse_attention --flow-config '{"top_k": 16}'
    sglang.Engine(model_path=MODEL, flow="gqa_quest_sparse_attention", flow_config={"top_k": 16})
"""

PLUGIN_NAME = "flowlib"
"""Name of the plugin, and of the attention backend it adds to SGLang."""


def register() -> None:
    """Adds the ``--flow`` flags, the attention backend and the hooks of the ledger to the running SGLang.

    SGLang logs an exception raised here and goes on without the plugin, and it only logs a hook that does not apply.
    So whether everything took is checked later, by the server arguments and by the backend, and only if a flow was
    asked for.
    """
    from flowlib.sglang import ledger
    from flowlib.sglang.backend import register_backend

    register_backend()
    ledger.register_hooks()
