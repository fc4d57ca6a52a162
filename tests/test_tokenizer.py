"""The tokenizer: llama.cpp's ids, plain text that never becomes a control token, whole characters while streaming."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from edge_pc.errors import ModelError, OptionError
from edge_pc.export.tokenizer_from_gguf import tokenizer_from_gguf
from edge_pc.models.gguf_file import GGUFFile
from edge_pc.models.tokenizer import Tokenizer

KINDS_OF_CHARACTERS = (
    "abcdefghij ABC  ",
    "0123456789 .,",
    "\n\r\t \u00a0\u3000\u2028\u0085",
    "éàüßñçøЖдαβγ漢字かなカナ한글",
    "😀👨‍👩‍👧‍👦🇩🇪👍🏽",
    "'s't're've'm'll'd'S'T'LL",
    '!@#$%^&*()_+-=[]{}|;:"<>?/\\~`',
    "²³½Ⅷ٣๓①",
    "\u200b\u200d\ufeff\u0301\u0308",
    "<|im_end|><|im_start|>",
)
PIECES = (*tiny.CONTROL_TOKENS, tiny.USER_DEFINED_TOKEN, " the", "They'll ", "12345", " 3.14", "!!\n", "\r\n", "    ")


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 30)):
        dice = rng.random()
        if dice < 0.15:
            parts.append(rng.choice(PIECES))
        elif dice < 0.2:  # any code point but a surrogate
            parts.append(chr(rng.choice([rng.randint(0x20, 0xD7FF), rng.randint(0xE000, 0x10FFFF)])))
        else:
            parts.append(rng.choice(rng.choice(KINDS_OF_CHARACTERS)))
    return "".join(parts)


@contextmanager
def llama_cpp_vocabulary(path: Path) -> Iterator[Any]:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    yield model
    model.close()


def check_against_llama_cpp(path: Path, texts: int) -> None:
    tokenizer = Tokenizer(tokenizer_from_gguf(GGUFFile(path)))
    rng = random.Random(0)
    with llama_cpp_vocabulary(path) as llama:
        for text in (random_text(rng) for _ in range(texts)):
            assert tokenizer.encode(text) == llama.tokenize(text.encode(), add_bos=False, special=False), text
            assert tokenizer.encode_template(text) == llama.tokenize(text.encode(), add_bos=False, special=True), text


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_ids_are_llama_cpps(pre: str, tmp_path: Path) -> None:
    check_against_llama_cpp(tiny.write_gguf(tmp_path / "tiny.gguf", pre=pre), 1500)


def write_sentencepiece(path: Path, *, prefix: bool, tie: bool = False, without: str = "") -> Path:
    """A GGUF file with a small SentencePiece vocabulary, scored as real ones are, and no weights."""
    import gguf

    characters = [*"▁abcdehilnorstuwy=.,é漢"]
    words = (
        "▁the",
        "▁then",
        "▁wor",
        "ld",
        "▁world",
        "hello",
        "▁hello",
        "==",
        "====",
        "===",
        "aaaa",
        "▁a",
        "▁an",
        "nt",
        "ent",
    )
    grown = [word[:end] for word in words for end in range(2, len(word) + 1)]
    pieces = [piece for piece in dict.fromkeys(grown) if piece not in characters]
    runs = ["▁" * length for length in (2, 4, 8, 3, 5, 6, 7)]
    tokens = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    tokens += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    tokens += [(run, -1e9, 1) for run in runs]
    tokens += [(piece, 0.0 if tie else -float(i), 1) for i, piece in enumerate(pieces)]
    tokens += [(character, -1000.0 - i, 1) for i, character in enumerate(characters)]
    tokens = [token for token in tokens if token[0] != without]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_vocab_size(len(tokens))
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_llama_cpps(prefix: bool, tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "sp.gguf", prefix=prefix)
    tokenizer = Tokenizer(tokenizer_from_gguf(GGUFFile(path)))
    rng = random.Random(0)
    choices = [
        "the",
        "then",
        " world",
        "hello",
        "=",
        "a",
        " ",
        "      ",
        "an",
        "t",
        "é",
        "漢",
        "😀",
        "\n",
        "<s>",
        "</s>",
        "▁",
    ]
    with llama_cpp_vocabulary(path) as llama:
        for _ in range(2000):
            text = "".join(rng.choice(choices) * rng.choice([1, 1, 1, 2, 9]) for _ in range(rng.randint(1, 12)))
            plain = llama.tokenize(text.encode(), add_bos=False, special=False)
            assert tokenizer.encode(text, boundary=True) == plain, text
            template = llama.tokenize(text.encode(), add_bos=False, special=True)
            assert tokenizer.encode_template(text, boundary=True) == template, text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_texts_are_joined_by_ids_without_stray_spaces(prefix: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tokenizer_from_gguf(GGUFFile(write_sentencepiece(tmp_path / "sp.gguf", prefix=prefix))))
    texts = ["hello", " world.", "\n", "then", "  é😀漢", "end"]
    ids = [id_ for i, text in enumerate(texts) for id_ in tokenizer.encode(text, boundary=i == 0)]
    assert tokenizer.decode(ids) == "".join(texts)
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(id_) for id_ in ids) + detokenizer.finish() == "".join(texts)


@pytest.mark.parametrize("prefix", [True, False])
def test_no_ids_stop_a_stream(prefix: bool, tmp_path: Path) -> None:
    """A model may write bytes that make no character, anywhere; the library's own stream raises there."""
    tokenizer = Tokenizer(tokenizer_from_gguf(GGUFFile(write_sentencepiece(tmp_path / "sp.gguf", prefix=prefix))))
    rng = random.Random(0)
    half, letter = tokenizer.id_of("<0xE6>"), tokenizer.id_of("a")
    assert half is not None
    assert letter is not None
    for _ in range(500):
        ids = [rng.choice([half, letter]) for _ in range(12)]
        detokenizer = tokenizer.detokenizer()
        text = "".join(detokenizer.push(id_) for id_ in ids) + detokenizer.finish()
        assert text.replace("\ufffd", "") == "a" * ids.count(letter)
        assert ("\ufffd" in text) == (half in ids)
    for _ in range(500):
        detokenizer = tokenizer.detokenizer()
        for _ in range(12):
            detokenizer.push(rng.randrange(tokenizer.vocab_size))
        assert isinstance(detokenizer.finish(), str)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"tie": True}, "have the same score"),
        ({"without": "<0x41>"}, "lacks 1 byte tokens, such as <0x41>"),
        ({"without": "w"}, "the character 'w' is part of tokens but no token itself"),
    ],
)
def test_sentencepiece_vocabularies_that_cannot_be_expressed(broken: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(GGUFFile(write_sentencepiece(tmp_path / "sp.gguf", prefix=True, **broken)))


def test_a_metaspace_in_front_of_every_text_is_switched_off(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a a") == [1, 2]
    assert tokenizer.encode("a a", boundary=True) == [2, 2]


@pytest.mark.real_model
def test_ids_are_llama_cpps_for_smollm2(smollm2_gguf: Path) -> None:
    check_against_llama_cpp(smollm2_gguf, 1500)


# NUL and half characters are refused.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


@given(
    text=st.lists(st.sampled_from([*PIECES, "<|", "|>", "im_end", "<", ">", " ", "\n", "a"]), max_size=12).map("".join)
)
def test_plain_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not {tokenizer.id_of(token) for token in tiny.CONTROL_TOKENS} & {*ids}
    assert tokenizer.decode(ids) == text


@given(text=TEXTS)
def test_plain_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_recognised_in_templates_only(tokenizer: Tokenizer) -> None:
    end = tokenizer.id_of("<|im_end|>")
    assert end is not None
    assert tokenizer.encode_template("a<|im_end|>b") == [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    assert tokenizer.encode_template("<|im_end|><|im_end|>") == [end, end]
    assert end not in tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode([end, *tokenizer.encode("b"), end]) == "b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ab\0c", r"its character 3 is NUL \(U\+0000\); it begins 'ab\\x00c'"),
        ("\ud83d and no more", r"its character 1 is half a character \(U\+D83D\)"),
        ("x" * 5000 + "\udcff", r"its character 5001 is half a character \(U\+DCFF\); it begins 'x{40}'"),
    ],
)
def test_characters_that_no_text_can_hold(text: str, words: str, tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_template):
        with pytest.raises(OptionError, match=words):
            encode(text)


def test_user_defined_tokens_are_no_control_tokens(tokenizer: Tokenizer) -> None:
    tool = tokenizer.id_of(tiny.USER_DEFINED_TOKEN)
    assert tool is not None
    assert tokenizer.encode("a<tool>") == [*tokenizer.encode("a"), tool]
    assert tokenizer.decode([tool]) == "<tool>"


def test_a_vocabulary_that_makes_control_tokens_of_text_is_found_out() -> None:
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    vocab = {letter: i for i, letter in enumerate("STOP ")} | {"STOP": 5}
    library = Library(models.BPE(vocab, [], ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens([AddedToken("STOP", special=True)])
    with pytest.raises(ModelError, match="plain text became the control token 'STOP'"):
        Tokenizer(library).encode("now STOP")


def test_no_bos_is_added_and_nothing_is_cut(tiny_hf: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.processors import TemplateProcessing

    library = Library.from_file(str(tiny_hf / "tokenizer.json"))
    library.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("0123456789")) == "0123456789"
    assert len(tokenizer.encode("0123456789")) == 10


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(ModelError, match="not a tokenizer that can be read"):
        Tokenizer.load(tmp_path)


@given(text=TEXTS)
def test_streaming_gives_the_text_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(id_) for id_ in tokenizer.encode(text)]
    assert all(part in text for part in parts)
    assert "".join(parts) + detokenizer.finish() == text


def test_an_emoji_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("é😀漢")
    assert len(ids) == 9
    assert [detokenizer.push(id_) for id_ in ids] == ["", "é", "", "", "", "😀", "", "", "漢"]
    assert detokenizer.finish() == ""


def test_bytes_that_never_become_a_character(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é")
    [letter] = tokenizer.encode("a")
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(first), detokenizer.finish()] == ["", "\ufffd"]
    assert detokenizer.finish() == ""
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(second), detokenizer.push(letter)] == ["", "\ufffda"]


def test_control_tokens_are_silent_in_a_stream(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    [letter] = tokenizer.encode("a")
    assert [detokenizer.push(id_) for id_ in (letter, 2, letter)] == ["a", "", "a"]


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rng = random.Random(3)
    texts = [random_text(rng) for _ in range(200)]
    expected = [(tokenizer.encode(text), tokenizer.encode_template(text)) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: (tokenizer.encode(text), tokenizer.encode_template(text)), texts)) == expected
