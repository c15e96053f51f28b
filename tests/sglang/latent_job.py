"""Run by ``test_latents``: several engines one after the other in one process, which takes seconds to import SGLang."""

import json
import os
import sys


def main(job_path, answers_path):
    import sglang

    with open(job_path) as file:
        jobs = json.load(file)
    answers = {}
    for name, job in jobs.items():
        os.environ.update(job["env"])
        engine = sglang.Engine(**job["engine"])
        answers[name] = []
        for prompts, new_tokens in job["waves"]:
            params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
            results = engine.generate(input_ids=prompts, sampling_params=params)
            answers[name].append([[r["output_ids"], r["meta_info"]["cached_tokens"]] for r in results])
        engine.shutdown()
        for variable in job["env"]:
            del os.environ[variable]
    with open(answers_path, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
