"""What of a model deals with text, and its sizes: all that is known of it without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_pc.models.chat_template import TEMPLATE_FILE, ChatTemplate, read_template
from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A model's spec, tokenizer and chat template."""

    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate


def describe(folder: Path) -> Description:
    """Describe the exported model in `folder`.

    Raises:
        ModelError: the folder is not an exported model, or one of its files is broken.
    """
    spec, template = ModelSpec.load(folder), folder / TEMPLATE_FILE
    source = read_template(template) if template.is_file() else None
    return Description(spec, Tokenizer.load(folder), ChatTemplate(source, spec.special_tokens))
