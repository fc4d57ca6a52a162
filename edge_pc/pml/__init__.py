"""PML, the markup of prompts made of reusable modules: its document model, its parser and the checking of prompts.

A schema holds every module that prompts may use, in the order in which the model will see them:

    <schema name="trip">
      <system>You plan trips.</system>                     chat tags become the model's own template
      <user>
        <module name="plan">                               a module is imported by name, or left out
          The trip lasts <param name="time" length="6"/>.  an argument of at most 6 tokens stands here
          <union>                                          at most one of these
            <module name="sea">We go to the coast.</module>
            <module name="rail" src="rail.txt"/>           the text of a file
          </union>
        </module>
      </user>
    </schema>

A prompt imports modules, gives arguments and adds the text that is new:

    <prompt schema="trip">
      <plan time="three days"><sea/></plan>
      <user>What should we pack?</user>
    </prompt>

`parse_schema` and `load_schema` give a `Schema`, `parse_prompt` and `load_prompt` a `Prompt`; `select` checks the one
against the other. Every fault is a `PMLError` with its place. The whole language is described in `schemas/README.md`.
"""

from edge_pc.pml.model import Prompt, Schema, Selection
from edge_pc.pml.prompt import load_prompt, parse_prompt
from edge_pc.pml.schema import load_schema, parse_schema
from edge_pc.pml.select import build_prompt, select

__all__ = [
    "Prompt",
    "Schema",
    "Selection",
    "build_prompt",
    "load_prompt",
    "load_schema",
    "parse_prompt",
    "parse_schema",
    "select",
]
