"""Answers that follow a grammar: every token of them, whoever the model is."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from pd_grpc.engine import grammar as grammar_module
from pd_grpc.engine import grammar_trial
from pd_grpc.engine.base import Sampled, SampleSpec
from pd_grpc.engine.constraint import constraint_of
from pd_grpc.engine.grammar import GrammarError, Grammars
from pd_grpc.engine.grammar_trial import Trials, needs_trial
from pd_grpc.engine.hf_tokenizer import HfTokenizer
from pd_grpc.engine.sampler import sample
from pd_grpc.protocol.sampling import GrammarKind, Sampling, StructuredOutput
from tests.engine.torch_models import VOCAB, byte_tokenizer

TOKENIZER = HfTokenizer(byte_tokenizer())
EOS = frozenset([257])
LONGEST = 300
TRIALS = Trials()


def grammars() -> Grammars:
    made = constraint_of(TOKENIZER, VOCAB, EOS)
    assert made is not None
    return made


def schema(of: object) -> StructuredOutput:
    return StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(of))


def regex(of: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.REGEX, of)


def spec_of(wanted: StructuredOutput, output: Sequence[int], **sampling: Any) -> SampleSpec:
    asked = Sampling(**{"max_tokens": LONGEST, "structured_output": wanted, **sampling})
    return SampleSpec(asked, len(output), len(output), None, tuple(output))


def written(
    wanted: StructuredOutput,
    seed: int = 0,
    by: Callable[[], Grammars] | None = None,
    **sampling: Any,
) -> list[Sampled]:
    """An answer of a model that has no idea: every token is as likely as any other. `by` gives the
    grammars anew for each token."""
    kept = grammars()
    noise = np.random.default_rng(seed)
    answer: list[Sampled] = []
    while len(answer) < LONGEST:
        spec = spec_of(wanted, [each.token_id for each in answer], **{"seed": seed, **sampling})
        logits = noise.normal(size=VOCAB).astype(np.float32)
        choose = partial(sample, logits, spec, EOS)
        one = (kept if by is None else by()).choose(spec, choose)
        answer.append(one)
        if one.fault or one.last or one.token_id in EOS:
            break
    return answer


def text_of(answer: Sequence[Sampled]) -> str:
    """What a client reads; UnicodeDecodeError where bytes are not text."""
    return LLTokenizer(TOKENIZER.to_json()).decode_bytes([a.token_id for a in answer]).decode()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "藍"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_is_valid_for_its_schema(seed: int) -> None:
    answer = written(schema(PERSON), seed)
    assert answer[-1].last
    value = json.loads(text_of(answer))
    assert {"name", "age"} <= {*value} <= {"name", "age", "tags"}
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert len(value.get("tags", [])) <= 3 and {*value.get("tags", [])} <= {"red", "grün", "藍"}


@pytest.mark.parametrize("pattern", ["(yes|no)", "[0-9]{4}-[0-9]{2}", "é{2,5}", "(日本|🎉🎊|ß)+x"])
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_matches_its_regular_expression_whole(pattern: str, seed: int) -> None:
    answer = written(regex(pattern), seed)
    said = [a for a in answer if a.token_id not in EOS]
    assert re.fullmatch(pattern, text_of(said))
    assert answer[-1].last


def test_what_can_go_no_further_ends_with_its_last_token_and_not_with_one_more() -> None:
    assert text_of(written(regex("abc"))) == "abc"


def test_what_could_go_on_ends_with_end_of_sequence_and_only_where_it_may() -> None:
    lengths = set()
    for seed in range(12):
        answer = written(regex("(ab)+"), seed)
        assert answer[-1].token_id in EOS and re.fullmatch("(ab)+", text_of(answer[:-1]))
        lengths.add(len(answer))
    assert len(lengths) > 1


def test_min_tokens_and_ignore_eos_hold_as_far_as_the_grammar_goes() -> None:
    for seed in range(6):
        assert len(written(regex("a+"), seed, min_tokens=30)) >= 30
        assert text_of(written(regex("yes|no"), seed, min_tokens=30)) in ("yes", "no")
        assert len(written(regex("a+"), seed, ignore_eos=True)) == LONGEST
        assert text_of(written(regex("a{9}"), seed, ignore_eos=True)) == "a" * 9
        # Nothing else may follow: the empty word alone.
        assert [a.token_id for a in written(regex("()"), seed, ignore_eos=True)] == [257]
    x = TOKENIZER.encode("x")[0]
    assert text_of(written(regex("ax"), min_tokens=5, stop_token_ids=(x,))) == "ax"


def test_where_a_grammar_stands_follows_from_the_tokens_alone() -> None:
    """As P's first token, a preemption and a continuation have it: by somebody who knows nothing
    else."""
    for seed in range(3):
        for wanted in (schema(PERSON), regex("(日本|🎉🎊|ß)+x")):
            anew = written(wanted, seed, by=grammars)
            assert anew == written(wanted, seed) and not anew[-1].fault


def test_equal_answers_do_not_disturb_each_other() -> None:
    one, other = grammars(), grammars()
    for seed in (1, 1, 2):
        assert written(schema(PERSON), seed, by=lambda: one) == written(
            schema(PERSON), seed, by=lambda: other
        )


def test_output_that_the_grammar_does_not_allow_is_told_where_it_leaves_it() -> None:
    known = grammars()
    grammar = known.compile(regex("abc+"), TRIALS)
    assert known.check_output(grammar, TOKENIZER.encode("abcc")) == 4
    assert known.check_output(grammar, TOKENIZER.encode("abx")) == 2
    chosen = known.choose(
        spec_of(grammar.wanted, TOKENIZER.encode("abx")), lambda mask: pytest.fail("no mask")
    )
    assert "does not follow" in chosen.fault


def test_logprobs_are_those_of_the_model_and_a_bias_moves_nothing_into_the_grammar() -> None:
    logits = np.zeros(VOCAB, np.float32)
    a, b, x = (TOKENIZER.encode(letter)[0] for letter in "abx")
    logits[x], logits[b] = 50, 1
    spec = spec_of(regex("a|b"), [], logprobs=1, temperature=0.0, logit_bias=((x, 100.0),))
    chosen = grammars().choose(spec, lambda mask: sample(logits, spec, EOS, mask))
    assert chosen.token_id == b and chosen.top[0].token_id == x
    assert chosen.logprob == pytest.approx(-49, abs=0.01)
    spec = spec_of(regex("a|b"), [], temperature=0.0, logit_bias=((a, 10.0),))
    assert grammars().choose(spec, lambda mask: sample(logits, spec, EOS, mask)).token_id == a


def test_a_token_that_is_not_in_the_mask_never_comes_out() -> None:
    spec = spec_of(regex("a|b"), [])
    chosen = grammars().choose(spec, lambda mask: Sampled(TOKENIZER.encode("x")[0]))
    assert chosen.fault and chosen.token_id == -1


BAD = {
    "not JSON": (
        StructuredOutput(GrammarKind.JSON_SCHEMA, "a person"),
        "cannot be read as JSON: expected value at line 1 column 1",
    ),
    "JSON that is cut off": (
        StructuredOutput(GrammarKind.JSON_SCHEMA, "{"),
        "cannot be read as JSON: EOF",
    ),
    "no schema": (schema([1]), "must be an object or true"),
    "a schema that nothing follows": (schema(False), "must be an object or true"),
    "an unknown type": (schema({"type": "strin"}), "strin"),
    "what is not built": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "leniency of its own": (
        schema({"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
        "not",
    ),
    "nothing at all": (schema({"type": "array", "items": False, "minItems": 1}), "unsatisfiable"),
    "elsewhere": (schema({"$ref": "http://127.0.0.1:1/x"}), "127.0.0.1"),
    "itself": (schema({"$ref": "#"}), "no answer can follow it"),
    "a depth": (
        StructuredOutput(GrammarKind.JSON_SCHEMA, '{"items":' * 5000 + "}" * 5000),
        "recursion",
    ),
    "a group left open": (regex("(a"), "unclosed group"),
    "looking ahead": (regex("(?=a)b"), "look-around"),
    "looking back": (regex(r"(a)\1"), "backreferences"),
    "the impossible": (regex(r"[^\s\S]"), "no answer can follow it"),
    "too many kinds": (
        schema(
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]}
        ),
        "too large",
    ),
    "a bound of a million": (regex("a{1000000}"), "no choice for 250001 bytes"),
    "a bound of bounds": (regex("((a{100}){100}){100}"), "no choice for"),
    "a bound behind a choice": (regex("[ab]{2}a{1000000}"), "too many states"),
    "a bound of 60,000 characters": (regex("a{60000}"), "60000 bytes; at most 50000"),
    "a pattern with such a bound": (
        schema({"type": "string", "pattern": "^a{1000000}$"}),
        "no choice for",
    ),
    "a pattern with such a bound, further in": (
        schema(
            {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^a{1000000}$"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
        "too many expressions",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_followed_is_refused_with_the_reason(case: str) -> None:
    wanted, reason = BAD[case]
    known = grammars()
    for _ in range(2):  # The second time from memory.
        with pytest.raises(GrammarError, match=re.escape(reason)):
            known.compile(wanted, TRIALS)
    assert isinstance(known._recent[wanted], str)


def test_a_bound_that_costs_nothing_is_no_fault() -> None:
    """However large: nothing is worked out of it before an answer gets there."""
    known = grammars()
    for wanted in (
        regex("[ab]{1000000}"),
        regex("a{0,1000000}"),
        regex("a{40000}"),
        schema({"type": "string", "maxLength": 1000000}),
        schema({"type": "array", "items": {"type": "integer"}, "maxItems": 1000000}),
    ):
        assert known.compile(wanted, TRIALS).wanted == wanted


def patterns(count: int) -> object:
    return {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(count)]}


def test_a_schema_that_takes_for_ever_takes_its_time_and_no_more() -> None:
    assert needs_trial(schema(patterns(50)).text)
    source = grammars()._source(schema(patterns(50)))
    assert TRIALS.try_grammar(source, cpu_s=0.2) == "takes more than 0.2 s to compile"
    assert TRIALS.try_grammar(grammars()._source(schema(patterns(1)))) == ""


def test_a_schema_that_eats_memory_eats_so_much_and_no_more() -> None:
    source = grammars()._source(schema({"enum": [{"a": [i]} for i in range(800)]}))
    assert "takes more than 1 MiB" in TRIALS.try_grammar(source, memory_bytes=1 << 20)


def test_only_what_is_small_and_plain_is_compiled_without_a_trial() -> None:
    assert not needs_trial(schema(PERSON).text.replace("\\", ""))
    for dear in ("allOf", "oneOf", "$ref", "pattern", "patternProperties", "format"):
        assert needs_trial(json.dumps({dear: 1}))
    assert needs_trial('{"\\u0061llOf": []}')
    assert needs_trial(json.dumps({"enum": ["x" * 4096]}))


def test_a_lexer_that_is_full_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "_LEXER_STATES", 600)
    wide = regex(r"(\w{1,60}\s){1,60}")
    meant = written(wide, 5, min_tokens=LONGEST)
    kept = grammars()
    compiled = []
    right = Grammars._compile

    def counted(
        self: Grammars, wanted: StructuredOutput, trials: Trials | None
    ) -> grammar_module.Grammar:
        compiled.append(wanted)
        return right(self, wanted, trials)

    monkeypatch.setattr(Grammars, "_compile", counted)
    assert written(wide, 5, by=lambda: kept, min_tokens=LONGEST) == meant
    assert len(compiled) > 1, "the lexer was never full"
    # What is dear to compile is not compiled between two steps: its request fails, by itself.
    monkeypatch.setattr(grammar_module, "_QUICK_S", -1.0)
    assert "too many states" in written(wide, 5, min_tokens=LONGEST)[-1].fault


def test_what_is_kept_is_bounded_and_what_is_held_is_kept() -> None:
    known = grammars()
    held = known.compile(regex("held"), TRIALS)
    for i in range(grammar_module._KEPT_GRAMMARS + 6):
        known.compile(regex(f"a{{{i + 1}}}"), TRIALS)
        written(regex(f"b{{{i + 1}}}c+"), by=lambda: known)
    assert len(known._recent) == grammar_module._KEPT_GRAMMARS
    assert known.known(held.wanted) is held and known.known(regex("a{1}")) is None
    for i in range(grammar_module._KEPT_POSITIONS + 6):
        spec = spec_of(regex("[a-z]+"), TOKENIZER.encode(_word(i)))
        known.choose(spec, lambda mask: Sampled(int(mask.argmax())))
    assert len(known._positions) == grammar_module._KEPT_POSITIONS


def _word(i: int) -> str:
    letters = random.Random(i)
    return "".join(letters.choice("abcdefgh") for _ in range(8))
