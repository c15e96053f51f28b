"""Run by ``engine.generate``: one engine, some waves of requests, the answers as JSON."""

import json
import os
import sys


def main(job_path, answers_path):
    import sglang

    with open(job_path) as file:
        job = json.load(file)
    engine = sglang.Engine(**job["engine"])
    answers = []
    for prompts, new_tokens in job["waves"]:
        params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        results = engine.generate(input_ids=prompts, sampling_params=params)
        answers.append(
            [{"output_ids": r["output_ids"], "cached_tokens": r["meta_info"]["cached_tokens"]} for r in results]
        )
    with open(answers_path, "w") as file:
        json.dump(answers, file)
    with open(os.path.join(os.path.dirname(answers_path), "info.json"), "w") as file:
        json.dump(engine.get_server_info(), file, default=str)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
