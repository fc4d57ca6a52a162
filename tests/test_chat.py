"""Chat templates: prefixes and suffixes cut out of what the model's own template writes, and turns that must merge."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny

from edge_pc.compose.composer import Composer
from edge_pc.compose.conversation import Conversation, check_turns
from edge_pc.compose.documents import documents_schema, question
from edge_pc.documents import Document
from edge_pc.errors import ModelError, OptionError, PMLError
from edge_pc.models.chat_template import Affixes, ChatTemplate
from edge_pc.models.description import describe
from edge_pc.pml import Schema, Selection, parse_prompt, parse_schema, select
from edge_pc.pml.model import Role

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SENTINELS = "ABCDEFG"

LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The system's text stands inside the first turn of the user; roles alternate.
LLAMA2 = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}"
    "{% for message in messages[start:] %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and start %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}"
    "{{ message.content }} [/INST]"
    "{% else %} {{ message.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
# No system turn; roles alternate; nothing opens the answer.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
# No system turn and alternating roles, and the assistant is called otherwise.
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Drops the system's text without a word, and takes turns in any order.
DEAF = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"

STYLES = {"chatml": tiny.CHAT_TEMPLATE, "llama3": LLAMA3, "llama2": LLAMA2, "mistral": MISTRAL, "gemma": GEMMA}


def written(source: str, roles: Sequence[Role]) -> str:
    """What a conversation becomes, turn by turn, with the texts A, B, C, …"""
    chat = ChatTemplate(source, TOKENS)
    check_turns(chat, roles)
    conversation = Conversation(chat)
    text = "".join(
        conversation.open(role) + letter + conversation.close() for role, letter in zip(roles, SENTINELS, strict=False)
    )
    return text + conversation.finish()


class TestAffixes:
    def test_a_default_system_prompt_belongs_to_the_first_prefix(self) -> None:
        chat = ChatTemplate(tiny.CHAT_TEMPLATE, {})
        assert chat.affixes("system", None) == Affixes("<|im_start|>system\n", "<|im_end|>\n")
        default = "<|im_start|>system\nYou are tiny.<|im_end|>\n"
        assert chat.affixes("user", None) == Affixes(default + "<|im_start|>user\n", "<|im_end|>\n")
        assert chat.affixes("user", "system") == Affixes("<|im_start|>user\n", "<|im_end|>\n")
        assert chat.affixes("user", "assistant") == Affixes("<|im_start|>user\n", "<|im_end|>\n")
        assert chat.affixes("assistant", "user") == Affixes("<|im_start|>assistant\n", "<|im_end|>\n")
        assert chat.generation_prompt == "<|im_start|>assistant\n"

    def test_a_bos_stands_in_the_first_prefix_only(self) -> None:
        chat = ChatTemplate(LLAMA3, {"bos_token": "<|begin_of_text|>"})
        header = "<|start_header_id|>user<|end_header_id|>\n\n"
        assert chat.affixes("user", None) == Affixes("<|begin_of_text|>" + header, "<|eot_id|>")
        assert chat.affixes("user", "assistant") == Affixes(header, "<|eot_id|>")

    def test_a_system_turn_inside_the_users(self) -> None:
        chat = ChatTemplate(LLAMA2, TOKENS)
        assert chat.affixes("system", None) == Affixes("<s>[INST] <<SYS>>\n", "\n<</SYS>>\n\n")
        assert chat.affixes("user", "system") == Affixes("", " [/INST]")
        assert chat.affixes("user", None) == Affixes("<s>[INST] ", " [/INST]")
        assert chat.affixes("user", "assistant") == Affixes("<s>[INST] ", " [/INST]")

    def test_a_templates_own_complaint_is_one_clear_line(self) -> None:
        chat = ChatTemplate(MISTRAL, TOKENS)
        assert chat.affixes("user", None) == Affixes("<s>[INST] ", " [/INST]")
        assert chat.affixes("user", "assistant") == Affixes("[INST] ", " [/INST]")
        assert chat.affixes("assistant", "user") == Affixes(" ", "</s>")
        assert chat.generation_prompt == ""
        with pytest.raises(OptionError) as caught:
            chat.affixes("assistant", None)
        assert str(caught.value) == (
            "the model's chat template refuses the turns assistant: Roles must alternate user/assistant"
        )

    def test_contents_that_a_template_drops_or_repeats(self) -> None:
        with pytest.raises(ModelError, match="no single place for the text of a system turn"):
            ChatTemplate(DEAF, {}).affixes("system", None)
        twice = "{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}"
        with pytest.raises(ModelError, match="no single place"):
            ChatTemplate(twice, {}).affixes("user", None)

    def test_what_depends_on_the_turns_after(self) -> None:
        last_only = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}<end>{% endif %}{% endfor %}"
        with pytest.raises(ModelError, match="earlier turns differently before one of the"):
            ChatTemplate(last_only, {}).affixes("user", "assistant")

    def test_templates_that_ask_for_tools_see_none(self) -> None:
        source = "{% if tools is not none %}TOOLS{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
        assert ChatTemplate(source, {}).affixes("user", None) == Affixes("", "")

    def test_a_model_without_a_template(self) -> None:
        for role in ("user", "system"):
            with pytest.raises(ModelError, match="has no chat template"):
                ChatTemplate(None, {}).affixes(role, None)  # type: ignore[arg-type]
            with pytest.raises(ModelError, match="has no chat template"):
                check_turns(ChatTemplate(None, {}), [role])  # type: ignore[list-item]
        assert check_turns(ChatTemplate(None, {}), []) == []

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{% for m in messages %}", "not valid Jinja"),
            ("{{ messages[7].content.upper() }}", "cannot be rendered"),
            ("{{ strftime_now('%d') }}{{ messages[0].content }}", "'strftime_now' is undefined"),
            ("{{ messages.append(1) }}{{ messages[0].content }}", "cannot be rendered"),
            ("{{ ''.__class__.__mro__ }}{{ messages[0].content }}", "cannot be rendered"),
            ("{% for i in range(10 ** 9) %}{% endfor %}{{ messages[0].content }}", "cannot be rendered"),
        ],
    )
    def test_broken_and_hostile_templates(self, source: str, message: str) -> None:
        for role in ("user", "system"):
            with pytest.raises(ModelError, match=message):
                check_turns(ChatTemplate(source, {}), [role])  # type: ignore[list-item]


class TestTurnByTurn:
    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize(
        "roles", [["user"], ["system", "user"], ["user", "assistant", "user"], ["system", "user", "assistant", "user"]]
    )
    def test_the_same_text_as_all_at_once(self, style: str, roles: list[Role]) -> None:
        chat = ChatTemplate(STYLES[style], TOKENS)
        turns = list(zip(roles, SENTINELS, strict=False))
        if style in ("mistral", "gemma") and roles[0] == "system":
            turns = [("user", "A\n\nB"), *turns[2:]]
        assert written(STYLES[style], roles) == chat.render(turns)

    @pytest.mark.parametrize("roles", [["user"], ["system", "user"], ["user", "assistant", "user"]])
    def test_the_same_text_as_transformers(self, roles: list[Role], tiny_hf: Path) -> None:
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_hf)
        messages = [{"role": role, "content": text} for role, text in zip(roles, SENTINELS, strict=False)]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        generation_prompt = ChatTemplate(tiny.CHAT_TEMPLATE, {}).generation_prompt
        assert written(tiny.CHAT_TEMPLATE, roles) + generation_prompt == expected

    def test_what_depends_on_the_turns_around_is_found(self) -> None:
        counted = "{% for m in messages %}<{{ m.role }} {{ loop.index }}>{{ m.content }}{% endfor %}"
        chat = ChatTemplate(counted, {})
        check_turns(chat, ["user", "assistant", "user"])
        with pytest.raises(ModelError, match="depends on the turns around"):
            check_turns(chat, ["user", "assistant", "user", "assistant"])

    def test_what_no_merging_can_mend_is_refused(self) -> None:
        for source in (LLAMA2, MISTRAL, GEMMA):
            with pytest.raises(OptionError, match=r"refuses the turns assistant: (R|r)oles must alternate"):
                check_turns(ChatTemplate(source, TOKENS), ["assistant", "user"])


class TestMerging:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            (MISTRAL, "<s>[INST] A\n\nB [/INST] C</s>[INST] D [/INST]"),
            (
                GEMMA,
                "<s><start_of_turn>user\nA\n\nB<end_of_turn>\n<start_of_turn>model\nC<end_of_turn>\n"
                "<start_of_turn>user\nD<end_of_turn>\n",
            ),
            (DEAF, "<user>A\n\nB</user><assistant>C</assistant><user>D</user>"),
        ],
    )
    def test_the_systems_text_opens_the_users_first_turn(self, source: str, text: str) -> None:
        assert written(source, ["system", "user", "assistant", "user"]) == text
        assert check_turns(ChatTemplate(source, TOKENS), ["system", "user"]) == [
            "has no place for a system turn here: its text opens the user's turn"
        ]

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            (MISTRAL, "<s>[INST] A\n\nB [/INST] C\n\nD</s>[INST] E [/INST]"),
            (LLAMA2, "<s>[INST] A\n\nB [/INST] C\n\nD </s><s>[INST] E [/INST]"),
        ],
    )
    def test_turns_of_one_role_go_on_in_the_first(self, source: str, text: str) -> None:
        assert written(source, ["user", "user", "assistant", "assistant", "user"]) == text
        assert check_turns(ChatTemplate(source, TOKENS), ["user", "user", "assistant", "assistant"]) == [
            "takes no two user turns in a row: they are written as one",
            "takes no two assistant turns in a row: they are written as one",
        ]

    @pytest.mark.parametrize("style", ["chatml", "llama3"])
    def test_templates_that_take_all_turns_get_all(self, style: str) -> None:
        roles: list[Role] = ["system", "user", "user", "assistant", "assistant", "system", "user"]
        chat = ChatTemplate(STYLES[style], TOKENS)
        assert check_turns(chat, roles) == []
        assert written(STYLES[style], roles) == chat.render(list(zip(roles, SENTINELS, strict=True)))

    def test_system_turns_in_other_places(self) -> None:
        assert written(MISTRAL, ["user", "system", "user"]) == "<s>[INST] A\n\nB\n\nC [/INST]"
        assert written(MISTRAL, ["user", "assistant", "system", "user"]) == (
            "<s>[INST] A [/INST] B</s>[INST] C\n\nD [/INST]"
        )
        assert written(LLAMA2, ["system", "system", "user"]) == "<s>[INST] <<SYS>>\nA\n\nB\n<</SYS>>\n\nC [/INST]"
        assert written(DEAF, ["user", "system", "user"]) == "<user>A</user><user>B\n\nC</user>"
        assert written(DEAF, ["user", "user"]) == "<user>A</user><user>B</user>"

    def test_a_system_turn_alone_is_the_users(self) -> None:
        assert written(MISTRAL, ["system"]) == "<s>[INST] A [/INST]"
        assert written(GEMMA, ["system", "assistant"]).startswith("<s><start_of_turn>user\nA<end_of_turn>\n<start_of_")


# --- laid out: positions stay fixed by the schema ---------------------------------------------------------------------

TRIP = parse_schema(
    '<schema name="trip"><system>Guide.</system>'
    '<user><module name="a">Sea.</module><module name="b">Hills.</module></user></schema>'
)


def composer(source: str, tiny_model: Path, folder: Path) -> Composer:
    """For the tiny model with another chat template."""
    shutil.copytree(tiny_model, folder / "model", ignore=shutil.ignore_patterns("*.data"))
    (folder / "model" / "chat_template.jinja").write_text(source)
    return Composer(describe(folder / "model"))


def told(source: str, schema: Schema, selection: Selection, tiny_model: Path, folder: Path) -> tuple[str, list[int]]:
    """What the model reads, and at which positions; control tokens of the tiny vocabulary are not shown."""
    made = composer(source, tiny_model, folder)
    plan = made.compose(schema, selection).computed_plan()
    return describe(tiny_model).tokenizer.decode(plan.token_ids.tolist()), plan.position_ids.tolist()


def asked(body: str) -> Selection:
    return select(parse_prompt(f'<prompt schema="trip">{body}</prompt>'), TRIP)


class TestLaidOut:
    @pytest.mark.parametrize(
        ("style", "text"),
        [
            ("llama3", "{start}system{end}Guide.{eot}{start}user{end}Sea.Hills.{eot}{start}user{end}Why?{eot}"),
            ("llama2", "[INST] <<SYS>>\nGuide.\n<</SYS>>\n\nSea.Hills.\n\nWhy? [/INST]"),
            ("mistral", "[INST] Guide.\n\nSea.Hills.\n\nWhy? [/INST]"),
            ("gemma", "<start_of_turn>user\nGuide.\n\nSea.Hills.\n\nWhy?<end_of_turn>\n<start_of_turn>model\n"),
        ],
    )
    def test_a_schemas_turns_and_a_prompts(self, style: str, text: str, tiny_model: Path, tmp_path: Path) -> None:
        """README's example: the prompt's question follows the schema's turn of the user."""
        read, positions = told(STYLES[style], TRIP, asked("<a/><b/><user>Why?</user>"), tiny_model, tmp_path)
        marks = {"start": "<|start_header_id|>", "end": "<|end_header_id|>\n\n", "eot": "<|eot_id|>"}
        expected = text.format(**marks)
        if style == "llama3":
            expected += "<|start_header_id|>assistant<|end_header_id|>\n\n"
        assert read == expected
        assert positions == list(range(len(positions)))

    @pytest.mark.parametrize("style", STYLES)
    def test_a_module_has_its_place_whatever_follows(self, style: str, tiny_model: Path, tmp_path: Path) -> None:
        made = composer(STYLES[style], tiny_model, tmp_path)
        bodies = ["<a/><b/>", "<b/><user>Why?</user>", "<b/><assistant>Well</assistant>", "<a/><b/><user>x</user>y"]
        keys = {
            encoding.paths: encoding.key
            for body in bodies
            for encoding in made.compose(TRIP, asked(body)).encodings
            if encoding.paths == ("b",)
        }
        stored = {encoding.paths: encoding.key for encoding in made.schema(TRIP).encodings.of_schema()}
        assert keys == {("b",): stored["b",]}

    def test_what_ends_the_schemas_turn_is_written_when_no_turn_goes_on_in_it(
        self, tiny_model: Path, tmp_path: Path
    ) -> None:
        for name, body, text in (
            ("nothing", "<a/>", "[INST] Guide.\n\nSea. [/INST]"),
            ("begun", "<a/><assistant>Well</assistant>", "[INST] Guide.\n\nSea. [/INST] Well"),
            ("second", "<a/><assistant>No</assistant>W?", "[INST] Guide.\n\nSea. [/INST] No[INST] W? [/INST]"),
        ):
            (tmp_path / name).mkdir()
            read, _ = told(MISTRAL, TRIP, asked(body), tiny_model, tmp_path / name)
            assert read.replace("<s>", "").replace("</s>", "") == text

    @pytest.mark.parametrize("style", STYLES)
    def test_a_question_about_files(self, style: str, tiny_model: Path, tmp_path: Path) -> None:
        schema, modules = documents_schema([Document("a.txt", "a.txt", "It rains.")], chat=True)
        read, positions = told(STYLES[style], schema, question("Why?", modules, chat=True), tiny_model, tmp_path)
        assert read.index("Answer the question") < read.index("It rains.") < read.index("Why?")
        assert positions == list(range(len(positions)))

    @pytest.mark.parametrize(
        ("style", "merges"),
        [
            ("chatml", []),
            ("llama2", ["takes no two user turns in a row"]),
            ("gemma", ["has no place for a system turn here", "takes no two user turns in a row"]),
        ],
    )
    def test_schema_check_says_what_happens(
        self, style: str, merges: list[str], tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        from edge_pc.cli import main

        composer(STYLES[style], tiny_model, tmp_path)
        (tmp_path / "trip.xml").write_text(
            '<schema name="trip"><system>Guide.</system><user><module name="a">Sea.</module></user></schema>'
        )
        (tmp_path / "bad.xml").write_text('<schema name="bad"><assistant>Hi</assistant></schema>')
        check = ["schema", "check", "--model", str(tmp_path / "model")]
        assert main([*check, str(tmp_path / "trip.xml")]) == 0
        said = " ".join(capfd.readouterr().err.split())
        assert "fine; 1 module" in said
        for merge in merges:
            assert f"warning: trip: the model's chat template {merge}" in said
        assert said.count("warning: trip:") == len(merges)
        refused = style != "chatml"
        assert main([*check, str(tmp_path / "bad.xml")]) == (2 if refused else 0)
        assert ("refuses the turns assistant" in " ".join(capfd.readouterr().err.split())) == refused

    def test_turns_that_are_refused_are_told_with_the_schema(self, tiny_model: Path, tmp_path: Path) -> None:
        schema = parse_schema('<schema name="s">\n<assistant>Hi</assistant></schema>', Path("s.xml"))
        with pytest.raises(PMLError, match=r"^s\.xml:1:1: the model's chat template refuses the turns assistant: "):
            composer(MISTRAL, tiny_model, tmp_path).schema(schema)
