"""What `soak.py` sends, and what came back."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from bench_serving_gate import VOCABULARY

if TYPE_CHECKING:
    from soak_report import Outcome

PROBES = 4
SHARES = {
    "plain": 0.5, "stream": 0.14, "probe": 0.1, "left": 0.08, "aborted": 0.08, "malformed": 0.06, "too long": 0.04,
}  # fmt: skip
"""How often each kind of request is sent: ``left`` has a client that goes away, ``aborted`` is cancelled by its id."""
MALFORMED: tuple[dict[str, Any], ...] = (
    {"input_ids": "no list of tokens"},
    {"input_ids": [5, 6, 7], "sampling_params": {"temperature": -1.0}},
    {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": "many"}},
    {"sampling_params": {"max_new_tokens": 4}},
    {"input_ids": [5, 6, 7], "sampling_params": {"top_p": 7.0}},
)


@dataclass(frozen=True)
class Request:
    """One request.

    Args:
        index: which.
        kind: one of :data:`SHARES`.
        prompt: token ids.
        new_tokens: how many are asked for; ``left`` and ``aborted`` requests get fewer.
        probe: which probe it is, or -1.
    """

    index: int
    kind: str
    prompt: list[int]
    new_tokens: int
    probe: int = -1

    @property
    def rid(self) -> str:
        """SGLang's name for it; no name begins another one, since SGLang aborts every request whose name begins so."""
        return f"probe-{self.probe:06d}" if self.index < 0 else f"soak-{self.index:06d}"


@dataclass(frozen=True)
class Answer:
    """What became of a request: HTTP status, tokens, their log probabilities, and the margin over the second best."""

    request: Request
    status: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    cached: int = 0
    error: str = ""


class Mix:
    """The requests of a run, the same for the same seed.

    Args:
        count: how many.
        pool_tokens: tokens of the server's KV pool; a prompt takes up to an eighth of it, an answer a sixty-fourth.
        seed: of everything random.
    """

    def __init__(self, count: int, pool_tokens: int, seed: int) -> None:
        self.count, self.pool_tokens, self.seed = count, pool_tokens, seed
        self.vocabulary = VOCABULARY
        self.longest, self._answer = pool_tokens // 8, pool_tokens // 64
        source = random.Random(seed)
        self._heads = [self._tokens(source, source.randrange(self.longest // 8, self.longest // 2)) for _ in range(8)]
        self.probes = [
            Request(-1, "probe", self._heads[i] + self._tokens(source, 37 * (i + 1)), 16, i) for i in range(PROBES)
        ]

    @staticmethod
    def _tokens(source: random.Random, count: int) -> list[int]:
        return [source.randrange(2, VOCABULARY) for _ in range(count)]

    def request(self, index: int) -> Request:
        """The request of a number."""
        source = random.Random(f"{self.seed} {index}")
        kind = source.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "probe":
            which = source.randrange(PROBES)
            return Request(index, kind, self.probes[which].prompt, self.probes[which].new_tokens, which)
        if kind == "too long":
            return Request(index, kind, self._tokens(source, self.pool_tokens + 64), 4)
        head = source.choice(self._heads) if source.random() < 0.6 else []
        prompt = head + self._tokens(source, source.randrange(1, self.longest - len(head)))
        return Request(index, kind, prompt, source.randrange(1, self._answer + 1))


class Asker:
    """A client of the server; use as an async context.

    Args:
        url: address of the server.
        vocabulary: tokens must be below it.
    """

    def __init__(self, url: str, vocabulary: int) -> None:
        self.url, self.vocabulary = url, vocabulary

    async def __aenter__(self) -> Asker:
        timeout = aiohttp.ClientTimeout(total=600)
        # a connection kept alive may be taken up just as the server, whose patience is 5 s, closes it
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def probe(self, request: Request) -> Answer:
        """A probe's answer; raises RuntimeError if there is none."""
        answer = await self.ask(request)
        if answer.status != 200:
            raise RuntimeError(f"the server did not answer a probe alone: {answer.status} {answer.error}")
        return answer

    async def ask(self, request: Request) -> Answer:
        """Sends a request and waits for what becomes of it; a connection that breaks is status 0."""
        try:
            return await self._ask(request)
        except (aiohttp.ClientError, TimeoutError) as error:
            return Answer(request, 0, error=f"{type(error).__name__}: {error}")

    async def _ask(self, request: Request) -> Answer:
        streamed = request.kind in ("stream", "left", "aborted")
        body: dict[str, Any] = {
            "input_ids": request.prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": request.new_tokens, "ignore_eos": True},
            "stream": streamed, "rid": request.rid, "return_logprob": True, "top_logprobs_num": 2,
        }  # fmt: skip
        if request.kind == "malformed":
            body = MALFORMED[request.index % len(MALFORMED)] | {"rid": body["rid"]}
        async with self._session.post(f"{self.url}/generate", json=body) as response:
            if not streamed:
                text = await response.text()
                return parse(request, response.status, text)
            return await self._follow(request, response)

    async def _follow(self, request: Request, response: aiohttp.ClientResponse) -> Answer:
        """Reads a stream to its end, or until the client goes away or cancels after some tokens."""
        last, stop = "", max(1, request.new_tokens // 3)
        asked = False
        async for line in response.content:
            text = line.decode().removeprefix("data: ").strip()
            if not text or text == "[DONE]":
                continue
            last = text
            seen = len(json.loads(text).get("output_ids", []))
            if request.kind == "left" and seen >= stop:
                response.close()
                break
            if request.kind == "aborted" and seen >= stop and not asked:
                asked = True
                async with self._session.post(f"{self.url}/abort_request", json={"rid": request.rid}):
                    continue
        return parse(request, response.status, last)

    async def prefilled(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Log probabilities of the tokens behind a prompt by prefill, which is dense. Raises RuntimeError."""
        body = {
            "input_ids": prompt + tokens, "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True, "logprob_start_len": len(prompt) - 1,
        }  # fmt: skip
        async with self._session.post(f"{self.url}/generate", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"the server did not score an answer: {response.status} {text[:300]}")
        entries = json.loads(text)["meta_info"]["input_token_logprobs"][-len(tokens) :]
        if [entry[1] for entry in entries] != tokens:
            raise RuntimeError(f"the server scored tokens {[entry[1] for entry in entries]}, expected {tokens}")
        return [entry[0] for entry in entries]

    async def flush(self) -> None:
        """Empties the radix cache. Raises RuntimeError if the server does not."""
        async with self._session.post(f"{self.url}/flush_cache") as response:
            if response.status != 200:
                raise RuntimeError(f"/flush_cache: {response.status} {await response.text()}")

    async def watch_usage(self, outcome: Outcome) -> None:
        """Keeps the largest share of the KV pool in use, and the count of retractions, from the server's metrics."""
        while True:
            async with self._session.get(f"{self.url}/metrics") as response:
                text = await response.text()
            outcome.usage.append(_metric(text, "sglang:token_usage"))
            outcome.retracted = max(outcome.retracted, int(_metric(text, "sglang:num_retracted_requests_total")))
            await asyncio.sleep(0.2)


def _metric(text: str, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return max(map(float, found), default=0.0)


def parse(request: Request, status: int, text: str) -> Answer:
    """What a body says."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return Answer(request, status, error=text[:300])
    if status != 200 or "output_ids" not in body:
        return Answer(request, status, error=str(body)[:300])
    told = body["meta_info"]
    best = told.get("output_top_logprobs") or []
    return Answer(
        request, status, body["output_ids"],
        [entry[0] for entry in told.get("output_token_logprobs") or []],
        [step[0][0] - step[1][0] for step in best if step], told.get("cached_tokens", 0),
    )  # fmt: skip
