"""What assistants say in templates that render an answer otherwise once others follow, or whose prompt opens a thought.

The expected tokens are those of the same template with marks around what an assistant says.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import records, tokenizer

from dptune.core.errors import ConfigError, DataError
from dptune.records.parquet_file import decode_content, encode_content
from dptune.records.reading.read import read
from dptune.records.reading.record import Chat, Record
from dptune.records.reading.source import RecordSource
from dptune.training.data import plain_ids
from dptune.training.tokens.encoding import chat_ids, encode_records, tokens_of
from dptune.training.tokens.waiting_chats import ends_of_answers, unanswered, without_answers

WIDTH = 400
_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<s>system:{{ tools | tojson }}<e>{% endif %}"
    "{% for d in documents or [] %}<s>{{ d.text }}{% endfor %}"
)
_CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<s>assistant:PROMPT{% endif %}"
#: Templates with ((...)) around what an assistant says.
TEMPLATES = {
    # as Qwen3's: the last answer gets a thought, an empty one where it has none, and earlier answers lose theirs
    "the last one thinks": _LAST + _TOOLS + "{% for m in messages %}<s>{{ m.role }}:{% if m.role == 'assistant' %}(("
    "{% if loop.index0 > ns.last %}{{ '[' + (m.reasoning_content or '') + ']' }}{% endif %}{{ m.content }}"
    + _CALLS + "<e>)){% else %}{{ m.content }}<e>{% endif %}{% endfor %}" + _PROMPT.replace("PROMPT", ""),
    # as R1's distils: thoughts are cut from all answers, and the prompt for the next one opens a thought
    "the prompt opens a thought": _TOOLS + "{% for m in messages %}<s>{{ m.role }}:{% if m.role == 'assistant' %}(("
    "{{ (m.content or '').split(']')[-1] }}" + _CALLS + "<e>)){% else %}{{ m.content }}<e>{% endif %}{% endfor %}"
    + _PROMPT.replace("PROMPT", "[\n"),
    # one whose prompt holds a whole empty thought, which no rendered answer has
    "the prompt holds a thought": _LAST + _TOOLS + "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.role == 'assistant' %}(({% if loop.index0 < ns.last %}{{ (m.content or '').split(']')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}" + _CALLS + "<e>)){% else %}{{ m.content }}<e>{% endif %}{% endfor %}"
    + _PROMPT.replace("PROMPT", "[\n\n]\n"),
    # as gpt-oss: the answer that ends the chat ends otherwise, and only the last one's thought is kept
    "the last one ends otherwise": _LAST + _TOOLS + "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.role == 'assistant' %}(({% if loop.index0 > ns.last and m.reasoning_content %}{{ '[' + m.reasoning_content"
    " + ']' }}{% endif %}{{ m.content }}" + _CALLS + "{% if loop.last and not add_generation_prompt %}<end>"
    "{% else %}<e>{% endif %})){% else %}{{ m.content }}<e>{% endif %}{% endfor %}" + _PROMPT.replace("PROMPT", ""),
}  # fmt: skip
MARKS = {"((": "{% generation %}", "))": "{% endgeneration %}"}


def tokens_with(template: str, *, marked: bool) -> Any:
    """A token for each character, and the template with the marks of generations or without any."""
    for mark, written in MARKS.items():
        template = template.replace(mark, written if marked else "")
    return tokenizer(template=template, merges=("[", "]"))


def counted(content: Chat, tokens: Any) -> tuple[list[int], list[bool]]:
    (row,) = tokens_of(records(content), tokens, WIDTH).rows
    return plain_ids(row).tolist(), (row >= 0).tolist()


def text_of(content: Chat, tokens: Any) -> str:
    ids, counts = counted(content, tokens)
    kept = [one for one, counts_it in zip(ids, counts, strict=True) if counts_it]
    return "".join(tokens.convert_ids_to_tokens(kept))


WORDS = st.text("abc 1", min_size=1, max_size=5).filter(str.strip)
THOUGHTS = st.one_of(st.just(""), WORDS.map(lambda text: f"[{text}]"))


@st.composite
def chats(draw: st.DrawFn) -> Chat:
    """A system's message at times, and turns in which an assistant may think, and may call a tool."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        if draw(st.booleans()):
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": draw(WORDS)}}]})
            messages.append({"role": "tool", "content": draw(WORDS)})
        answer = {"role": "assistant", "content": draw(THOUGHTS) + draw(WORDS)}
        messages.append(answer | ({"reasoning_content": draw(WORDS)} if draw(st.booleans()) else {}))
    inputs = {"tools": [{"name": draw(WORDS)}]} if draw(st.booleans()) else {}
    return Chat(tuple(messages), inputs)


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=chats())
def test_what_is_learned_is_what_the_template_renders_of_an_assistant(name: str, content: Chat) -> None:
    """The same ids and the same tokens that count, as if the template had marked them."""
    found, expected = (counted(content, tokens_with(TEMPLATES[name], marked=marked)) for marked in (False, True))
    assert found == expected
    assert any(expected[1])
    assert not all(expected[1])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "the last one ends otherwise"])
@given(content=chats(), greeting=WORDS)
def test_the_header_of_an_assistant_who_speaks_first_is_not_learned(name: str, content: Chat, greeting: str) -> None:
    rest = content.messages[content.messages[0]["role"] == "system" :]
    content = Chat(({"role": "assistant", "content": greeting}, *rest), content.inputs)
    found, expected = (counted(content, tokens_with(TEMPLATES[name], marked=marked)) for marked in (False, True))
    assert found == expected


@pytest.mark.parametrize("name", [*TEMPLATES, "marked"])
@given(content=chats())
def test_an_answer_is_asked_for_and_compared_as_it_was_learned(name: str, content: Chat) -> None:
    """The model reads what training showed it, and one that learned the answer by heart writes the reference."""
    marked = name == "marked"
    tokens = tokens_with(TEMPLATES["the last one thinks" if marked else name], marked=marked)
    (record,) = records(content)
    (found,) = without_answers([record], tokens)
    ids, counts = counted(content, tokens)
    before = chat_ids(found.prompt, tokens)
    assert ids[: len(before)] == before
    assert all(counts[len(before) :])
    written = "".join(tokens.convert_ids_to_tokens(ids[len(before) :]))
    assert written.endswith(found.behind)
    assert found.answer == written.removesuffix(found.behind).strip()
    assert found.answer.endswith(str(content.messages[-1]["content"]).split("]")[-1].strip())


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=chats())
def test_a_chat_that_nobody_answered_reads_as_one_whose_answer_was_taken_out(name: str, content: Chat) -> None:
    *before, last = content.messages
    answer = {"role": "assistant", "content": str(last["content"]).split("]")[-1]}  # without a thought
    tokens = tokens_with(TEMPLATES[name], marked=False)
    answered, open_chat = (Chat(tuple(some), content.inputs) for some in ([*before, answer], before))
    (one,), (other,) = records(answered), records(open_chat)
    (taken_out,), (found,) = without_answers([one], tokens), unanswered([other], tokens)
    assert (found.prompt, found.behind) == (taken_out.prompt, taken_out.behind)


def test_a_space_before_an_answer_belongs_to_its_first_token() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} <e>{% endfor %}"
    tokens = tokenizer(template=template, merges=(" a",))
    (record,) = records(Chat(({"role": "user", "content": "b"}, {"role": "assistant", "content": "ab"})))
    (found,) = without_answers([record], tokens)
    assert (found.prompt, found.answer, found.behind) == ("user: b <e>assistant:", "ab", " <e>")
    ids, before = counted(record.content, tokens)[0], chat_ids(found.prompt, tokens)  # type: ignore[arg-type]
    assert ids[: len(before)] == before


def test_special_tokens_within_an_answer_are_not_compared() -> None:
    """gpt-oss puts special tokens between a thought and an answer, which neither outputs nor references hold."""
    template = (
        "{% for m in messages %}<s>{{ m.role }}:{% if m.reasoning_content %}{{ m.reasoning_content }}<s>{% endif %}"
        "{{ m.content }}<e>{% endfor %}"
    )
    answer = {"role": "assistant", "content": "a", "reasoning_content": "bc"}
    (record,) = records(Chat(({"role": "user", "content": "1"}, answer)))
    (found,) = without_answers([record], tokenizer(template=template))
    assert found.answer == "bca"


def test_an_answer_ends_at_the_templates_own_token() -> None:
    """Gemma's template ends a turn with a token that is not the tokenizer's end of a text; Phi's writes two."""
    template = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}\n<e><end>{% endfor %}"
    tokens = tokenizer(template=template)
    (record,) = records(Chat(({"role": "user", "content": "a"},)))
    end, eos = tokens.convert_tokens_to_ids(["<e>", "<end>"])
    assert ends_of_answers(unanswered([record], tokens), tokens) == [eos], "<e> is one of many letters here"
    tokens.add_tokens(["<e>"], special_tokens=False)
    assert ends_of_answers(unanswered([record] * 2, tokens), tokens) == [end]
    tokens.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    assert ends_of_answers(unanswered([record], tokens), tokens) == []


def test_a_chat_that_ends_otherwise_is_refused_by_name() -> None:
    tokens = tokens_with(TEMPLATES["the last one thinks"], marked=False)
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    calls = answer | {"tool_calls": [{"function": {"name": "b"}}]}
    for said in ([asked], [asked, answer, asked], [asked, answer | {"content": " "}], [asked, calls], [answer]):
        with pytest.raises(
            DataError, match=r"a\.jsonl, row 1: the chat does not end in an assistant's text.*Fix: give one"
        ):
            without_answers(records(Chat(tuple(said))), tokens)
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: the chat ends in an answer.*Fix: leave its last message"):
        unanswered(records(Chat((asked, answer))), tokens)
    silent = {"role": "assistant", "tool_calls": [{"function": {"name": "b"}}]}
    for template, said in (
        ("{% for m in messages %}{{ m.role }}:{{ m.content }}<e>{% endfor %}", [silent, asked]),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<e>{% endfor %}", [asked]),
    ):
        with pytest.raises(DataError, match=r"a\.jsonl, row 1: .*(has only tool_calls|leaves out what)"):
            unanswered(records(Chat(tuple(said))), tokenizer(template=template))
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        unanswered(records(Chat((asked,))), tokenizer())


def test_a_thought_that_the_prompt_opens_is_not_learned_where_the_answer_has_it() -> None:
    """QwQ's template begins the thought in the prompt, so that the model never writes that beginning."""
    template = TEMPLATES["the last one thinks"].replace(_PROMPT.replace("PROMPT", ""), _PROMPT.replace("PROMPT", "["))
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"})
    assert text_of(Chat((*said, *said)), tokens_with(template, marked=False)) == "b<e>c]b<e>"


TOOLS = [{"type": "function", "function": {"name": "ab", "parameters": {"type": "object", "properties": {}}}}]
GIVEN = {
    "a list": {"tools": TOOLS},
    "JSON": {"tools": json.dumps(TOOLS)},
    "documents": {"documents": [{"title": "a", "text": "12"}]},
    "own options": {"chat_template_kwargs": {"tone": "b"}},
    "all of them": {"tools": TOOLS, "documents": [{"title": "a", "text": "12"}], "chat_template_kwargs": {"tone": "b"}},
    "none": {"tools": None, "chat_template_kwargs": None},
}


@pytest.mark.parametrize("given_as", GIVEN)
@pytest.mark.parametrize("name", [*TEMPLATES, "marked"])
def test_what_stands_beside_a_chat_reaches_its_template_as_in_trl(name: str, given_as: str) -> None:
    """TRL: tools = example.get("tools"), JSON or not; apply_chat_template(messages, tools=tools, **own options)."""
    row = GIVEN[given_as]
    template = "{{ tone or '' }}" + TEMPLATES["the last one thinks" if name == "marked" else name]
    tokens = tokens_with(template, marked=name == "marked")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    (record,) = read(RecordSource([{"messages": messages, **row}]))
    tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
    options = row.get("chat_template_kwargs") or {}
    expected = tokens.apply_chat_template(
        messages, tools=tools, documents=row.get("documents"), return_dict=False, **options
    )
    assert isinstance(record.content, Chat)
    assert counted(record.content, tokens)[0] == expected
    assert counted(decode_content(encode_content(record.content), "messages"), tokens)[0] == expected  # type: ignore[arg-type]
    plain = tokens.apply_chat_template(messages, return_dict=False)
    assert (plain == expected) == (given_as == "none")


def test_a_completion_of_messages_is_learned_whole_and_its_prompt_not_at_all() -> None:
    """TRL's completion mask counts all that follows the generation prompt, a tool's answer included."""
    said = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    tool = {"role": "tool", "content": "1"}
    (record,) = read(RecordSource([{"prompt": said[:3], "completion": [said[3], tool, said[1]], "tools": TOOLS}]))
    for name, template in TEMPLATES.items():
        tokens = tokens_with(template, marked=False)
        expected = f"d<e><s>tool:1<e><s>assistant:b{'<end>' if 'ends otherwise' in name else '<e>'}"
        found = text_of(record.content, tokens)  # type: ignore[arg-type]
        assert re.sub(r"[\[\]]", "", found) == "".join(tokens.convert_ids_to_tokens(tokens(expected)["input_ids"])), (
            name
        )


def test_a_completion_begins_where_that_of_trl_does() -> None:
    """TRL: where the tokens of the prompt, with the generation prompt, and those of the whole chat part."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "[\n1]b"}]
    for name, template in TEMPLATES.items():
        tokens = tokens_with(template, marked=False)
        ids, counts = counted(Chat(tuple(said), {}, 1), tokens)
        prompt = tokens.apply_chat_template(said[:1], add_generation_prompt=True, return_dict=False)
        parts = next(n for n, (one, other) in enumerate(zip([*prompt, -1], ids, strict=False)) if one != other)
        assert counts == [n >= parts for n in range(len(ids))], name


def test_a_prompt_that_is_rendered_otherwise_is_not_learned() -> None:
    """The thought that the prompt's own answer has, where it is the last one, is not in the whole chat."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    tokens = tokens_with(TEMPLATES["the last one thinks"], marked=False)
    assert text_of(Chat(tuple(said), {}, 2), tokens) == "user:a<e><s>assistant:[]b<e>"


def test_a_call_of_tools_that_the_template_does_not_know_is_refused() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "ab"}}]}
    tokens = tokens_with(TEMPLATES["the prompt opens a thought"].replace("tool_calls", "other"), marked=False)
    asked = {"role": "user", "content": "a"}
    with pytest.raises(DataError, match=r"row 1: message 2 has only tool_calls"):
        counted(Chat((asked, call)), tokens)
    # Each column of a pair counts its own messages.
    for chat, where in (
        (Chat((asked, call, asked, call), {}, 3), "'question': message 2"),
        (Chat((asked, asked, call), {}, 1), "'reply': message 2"),
    ):
        record = Record(chat, 0, "a.jsonl", 1, columns=("question", "reply"))
        with pytest.raises(DataError, match=f"row 1, column {where} has only tool_calls"):
            encode_records([record], tokens, 99)


def test_an_error_about_a_whole_chat_names_all_its_columns() -> None:
    tokens = tokens_with("{{ raise_exception('no') }}", marked=False)
    pair = Chat(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), {}, 1)
    record = Record(pair, 0, "a.jsonl", 7, columns=("question", "reply"))
    with pytest.raises(DataError, match="row 7, columns 'question' and 'reply': the chat template does not take"):
        encode_records([record], tokens, 99)


@pytest.mark.parametrize("marked", [False, True])
def test_a_call_without_content_is_read_as_an_empty_one_where_the_template_needs_a_text(marked: bool) -> None:
    """DeepSeek's adds the content to a text, and transformers hands no null to a template."""
    called = "{{ '' + m['content'] }}" + _CALLS
    template = "{% for m in messages %}<s>{{ m.role }}:{% if m.role == 'assistant' %}((" + called
    template += "<e>)){% else %}{{ m.content }}<e>{% endif %}{% endfor %}" + _PROMPT.replace("PROMPT", "")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "ab"}}]}
    said = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "c"}]
    said.append({"role": "assistant", "content": "d"})
    tokens = tokens_with(template, marked=marked)
    whole = [{"content": ""} | message for message in said]
    assert counted(Chat(tuple(said)), tokens) == counted(Chat(tuple(whole)), tokens)
    assert text_of(Chat(tuple(said)), tokens) == "[ab]<e>d<e>"


@pytest.mark.parametrize("marked", [False, True])
def test_a_call_that_the_template_renders_beside_no_content_alone_is_refused(marked: bool) -> None:
    """An empty content would leave the call out, and an empty answer would be learned."""
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% elif m['content'] is none %}(("
    template += _CALLS + ")){% else %}(({{ '' + m['content'] }})){% endif %}{% endfor %}"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "ab"}}]}
    with pytest.raises(DataError, match=r"the chat template does not take these messages \(UndefinedError\)"):
        counted(Chat(({"role": "user", "content": "x"}, call)), tokens_with(template, marked=marked))
