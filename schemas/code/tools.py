"""The club's tools and whether they can be lent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tool:
    """One tool; `price` is what a new one costs, in cents."""

    number: int
    name: str
    price: int
    broken: bool = False


@dataclass
class Shed:
    """All tools of the club, by number."""

    tools: dict[int, Tool] = field(default_factory=dict)

    def add(self, name: str, price: int) -> Tool:
        number = max(self.tools, default=0) + 1
        self.tools[number] = Tool(number, name, price)
        return self.tools[number]

    def search(self, word: str) -> list[Tool]:
        """Tools whose name holds `word` and which can be used, cheapest first."""
        found = [tool for tool in self.tools.values() if word.lower() in tool.name.lower() and not tool.broken]
        return sorted(found, key=lambda tool: tool.price)
