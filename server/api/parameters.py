"""The parameters that every endpoint that generates text takes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from tokenteller.model.grammar import Kind
from tokenteller.model.sampler import SamplingParams
from tokenteller.server.api.body import Body
from tokenteller.server.api.streams import GenerationRequest
from tokenteller.server.api.strict_json import quoted
from tokenteller.server.errors import Unprocessable

StopSequence = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class GenerationBody(Body):
    """How tokens are sampled, where the text ends, and how the request waits and runs."""

    operation: ClassVar[str] = "text_completion"
    default_max_tokens: ClassVar[int] = 128

    max_tokens: int | None = Field(None, ge=1, description="tokens to generate")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_k: int = Field(0, ge=-1, le=2**31, description="0 or -1 is off")
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="counts prompt and output; 1 is off")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="counts the output")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="counts the output")
    logit_bias: dict[str, Bias] = Field({}, max_length=1024, description="token id, as a string, to -100..100")
    seed: int | None = Field(None, ge=0, lt=2**64, description="absent: random")
    n: int = Field(1, ge=1, le=8, description="choices, each with its own random numbers")
    stop: list[StopSequence] = Field([], max_length=16, description="a string or up to 16 of 1 to 256 characters")
    stop_token_ids: list[int] = Field([], max_length=64)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, description="tokens before which the text neither ends nor stops")
    priority: int = Field(0, ge=-100, le=100, description="lower goes first; each step is worth 10 s of waiting")
    deadline_ms: int | None = Field(None, ge=1, le=2**31, description="then the answer ends as it stands")
    max_queue_ms: int | None = Field(None, ge=1, le=2**31, description="gives up if there is no slot by then")
    cache_prefix: bool = Field(True, description="whether the prefix cache is used, for reading and writing")
    cache_salt: str = Field("", max_length=256, description="prefixes are shared only between equal salts")
    json_schema: dict[str, Any] | None = Field(None, description="the text is JSON that this schema allows")
    regex: str | None = Field(None, description="the whole text matches this regular expression")
    grammar: str | None = Field(None, description="the whole text follows this grammar, in llguidance's Lark syntax")

    def grammar_source(self) -> tuple[Kind, str] | None:
        """What constrains the text. Raises Unprocessable."""
        fields: dict[Kind, str | None] = {
            "json_schema": None if self.json_schema is None else json.dumps(self.json_schema, ensure_ascii=False),
            "regex": self.regex,
            "grammar": self.grammar,
        }
        given = [(kind, text) for kind, text in fields.items() if text is not None]
        if len(given) > 1:
            raise Unprocessable(f"give only one of {' and '.join(kind for kind, _ in given)}", param=given[1][0])
        for kind, _ in given:
            self.check_combines_with_grammar(kind)
        return given[0] if given else None

    def check_combines_with_grammar(self, name: str) -> None:
        """Refuses what would cut a constrained answer off or keep it from ending. Raises Unprocessable."""
        for field in ("stop", "stop_token_ids", "ignore_eos", "min_tokens"):
            if getattr(self, field):
                raise Unprocessable(f"{field} cannot be combined with {name}: the answer might not parse", param=field)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, value: dict[str, float]) -> dict[str, float]:
        wrong = next((key for key in value if not re.fullmatch(r"[0-9]{1,10}", key)), None)
        if wrong is not None:
            raise ValueError(f"the key {quoted(wrong)} is not a token id")
        if len({int(key) for key in value}) < len(value):
            raise ValueError("a token id is given twice")
        return value

    def generation(
        self, id: str, prompt: str | Sequence[int], max_tokens: int | None, logprobs: int | None
    ) -> GenerationRequest:
        """The request that this body asks for. Raises Unprocessable."""
        return GenerationRequest(
            id,
            prompt,
            max_tokens,
            self._sampling(logprobs),
            n=self.n,
            stops=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            grammar=self.grammar_source(),
            priority=self.priority,
            deadline_ms=self.deadline_ms,
            max_queue_ms=self.max_queue_ms,
            cache_prefix=self.cache_prefix,
            cache_salt=self.cache_salt,
            default_max_tokens=self.default_max_tokens,
            operation=self.operation,
        )

    def _sampling(self, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(53) if self.seed is None else self.seed % 2**64,  # 53 bits survive JavaScript
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(key), bias) for key, bias in self.logit_bias.items()),
            min_tokens=self.min_tokens,
            logprobs=logprobs,
        )
