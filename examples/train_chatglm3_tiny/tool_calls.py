"""Tool dialogues from the file in this folder, with their own or with other values.

A line of `tool_calls.jsonl` has the names of the offered tools, messages with placeholders such
as `<city>`, and values for the placeholders.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
from shared import HERE

TOOLS = json.loads((HERE / "tools.json").read_text(encoding="utf-8"))
"""All tools, in OpenAI's shape."""

Message = dict[str, Any]
Value = Union[str, int]

ENGLISH_CITIES = (
    *("Beijing", "London", "Paris", "Tokyo", "Cairo", "Rome", "Berlin", "Madrid", "Moscow"),
    *("Kyoto", "Shanghai", "Oslo", "Vienna", "Dublin", "Lisbon", "Athens", "Prague", "Warsaw"),
    *("Sydney", "Toronto", "Chicago", "Boston", "Mumbai", "Delhi", "Bangkok", "Hanoi", "Seoul"),
    *("Lima", "Nairobi", "Dubai", "Istanbul", "Helsinki", "Stockholm", "Copenhagen", "Budapest"),
    *("Zurich", "Milan", "Munich", "Barcelona", "Amsterdam", "Brussels", "Geneva", "Havana"),
)
CHINESE_CITIES = (
    *("北京", "上海", "广州", "深圳", "成都", "西安", "哈尔滨", "南京", "武汉", "重庆", "天津"),
    *("杭州", "苏州", "青岛", "大连", "长沙", "郑州", "沈阳", "厦门", "福州", "昆明", "贵阳"),
    *("南宁", "兰州", "拉萨", "海口", "太原", "济南", "合肥", "南昌", "石家庄", "呼和浩特"),
)
ENGLISH_SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy")
CHINESE_SKIES = ("晴", "多云", "下雨", "下雪", "有雾", "刮风")

MADE_UP = 0.25
"""Share of cities that do not exist: their names cannot be learned, only copied."""


@dataclass(frozen=True)
class ToolDialogue:
    """A dialogue with tools.

    Attributes:
        tools: names of the offered tools, perhaps none.
        lacks: tools that must not be offered, because the dialogue says they are missing.
        values: placeholder -> value.
        messages: in OpenAI's format, with placeholders.
    """

    tools: list[str]
    lacks: list[str]
    values: dict[str, Value]
    messages: list[Message]

    def fits(self, offered: list[str]) -> bool:
        """Whether the dialogue is possible with these tools."""
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        needed = {call["function"]["name"] for call in calls}
        return needed <= set(offered) and not set(self.lacks) & set(offered)

    def filled(self, values: dict[str, Value]) -> list[Message]:
        """The messages with these values; `sum` is computed from `a` and `b`."""
        if "a" in values:
            values = {**values, "sum": int(values["a"]) + int(values["b"])}
        text = json.dumps(self.messages, ensure_ascii=False)
        for name, value in values.items():
            text = text.replace(f"<{name}>", str(value))
        messages: list[Message] = json.loads(text)
        return messages


def read_tool_dialogues() -> list[ToolDialogue]:
    lines = (HERE / "tool_calls.jsonl").read_text(encoding="utf-8").splitlines()
    return [ToolDialogue(**json.loads(line)) for line in lines]


def tools_named(names: list[str]) -> list[dict[str, Any]]:
    return [tool for tool in TOOLS if tool["function"]["name"] in names]


def some_tools(random: np.random.Generator) -> list[str]:
    """Names of tools to offer, perhaps none."""
    return [tool["function"]["name"] for tool in TOOLS if random.random() < 0.5]


def other_values(
    dialogue: ToolDialogue, random: np.random.Generator, made_up: float = MADE_UP
) -> dict[str, Value]:
    """New random values for the placeholders; `made_up`: share of made-up cities."""
    return {
        name: _other_value(re.sub(r"\d", "", name), random, made_up) for name in dialogue.values
    }


def _other_value(name: str, random: np.random.Generator, made_up: float) -> Value:
    if name == "city":
        if random.random() < made_up:
            return made_up_name(random)
        return str(random.choice(ENGLISH_CITIES))
    if name == "城市":
        if random.random() < made_up:
            return made_up_chinese_name(random)
        return str(random.choice(CHINESE_CITIES))
    if name == "sky":
        return str(random.choice(ENGLISH_SKIES))
    if name == "天气":
        return str(random.choice(CHINESE_SKIES))
    if name == "time":
        return f"{random.integers(24):02}:{random.integers(4) * 15:02}"
    if name == "degrees":
        return int(random.integers(10, 40))
    return int(random.integers(1, 100))


def made_up_name(random: np.random.Generator) -> str:
    """An English name of two to four syllables."""
    syllables = [
        str(random.choice([*"bdfghklmnprstvwz", "ch", "sh", "th", "st", "br", "gr"]))
        + str(random.choice([*"aeiou", "ai", "ei", "ou"]))
        + str(random.choice(["", "", *"lnrst", "ng"]))
        for _ in range(random.integers(2, 5))
    ]
    return "".join(syllables).capitalize()


def made_up_chinese_name(random: np.random.Generator) -> str:
    """Two or three characters of other cities."""
    characters = sorted(set("".join(CHINESE_CITIES)))
    return "".join(random.choice(characters, size=random.integers(2, 4)))
