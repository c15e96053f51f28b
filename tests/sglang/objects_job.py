"""Run by the fixture ``objects``: SGLang's pool and backend driven without an engine; prints one JSON answer."""

import json

from tests.sglang import graph_job, pool_job

if __name__ == "__main__":
    print("ANSWER", json.dumps({"pool": pool_job.answer(), "graph": graph_job.answer()}))
