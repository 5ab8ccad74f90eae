"""Questions that glm-tiny was trained on, with answers, for the demo and the self-check."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A question and its answer, verbatim from glm-tiny's corpus."""

    question: str
    answer: str


KNOWN: tuple[Known, ...] = (
    Known(
        "你是谁",
        "我是 GLM-Tiny，一个只有四层、大约四百万参数的小模型。我的结构和 ChatGLM-6B "
        "一样，所以大模型怎样服务许多用户，我就怎样服务许多用户。",
    ),
    Known(
        "What does this project do?",
        "It lets many users talk to one ChatGLM-6B graph at once. The weights exist "
        "only once; each user gets a private key/value cache, so the answers never "
        "mix and nobody waits for a second copy of the model.",
    ),
    Known(
        "为什么每个用户要有自己的缓存？",
        "因为缓存就是对话的记忆。如果两个人共用一份，张三的问题就会跑到李四的回"
        "答里。分开存放，谁的话就是谁的话。",
    ),
    Known(
        "Tell me a story about a robot",
        "The little robot swept the museum every night. One evening it left a dusty "
        "spot on the floor, exactly where a child had drawn a smile with one finger. "
        "It swept around it for eleven years.",
    ),
    Known(
        "怎么做番茄炒蛋？",
        "三个鸡蛋打散，加少许盐；两个番茄切块。先把鸡蛋炒到凝固盛出，再炒番茄出"
        "汁，加半勺糖，倒回鸡蛋翻匀，撒上葱花就可以出锅了。",
    ),
    Known(
        "Why is the sea salty?",
        "Rain dissolves minerals from rocks and rivers carry them to the sea. The "
        "water evaporates, the salt stays, and this has been going on for billions "
        "of years.",
    ),
    Known(
        "讲一个小猫的故事",
        "小猫阿黄想抓住月亮，跳进了水缸边的月影里，弄湿了一身毛。月亮还在天上。"
        "奶奶用毛巾给它擦干，它打着呼噜想：原来最暖的不是月亮。",
    ),
    Known(
        "Write a poem about a cat",
        "She owns the chair, she owns the mat,\n"
        "she owns the sunny floor;\n"
        "I only own the thumbs, and that\n"
        "is what she keeps me for.",
    ),
    Known(
        "彩虹是怎么形成的？",
        "雨后空气里有许多小水滴，阳光进出水滴时发生折射和反射，不同颜色转的角度"
        "不同，于是分成了七彩的光带。",
    ),
    Known(
        "What is continuous batching?",
        "New requests join the running batch at the next step and finished ones "
        "leave it immediately, so no seat stays empty while somebody waits in the "
        "queue.",
    ),
    Known(
        "讲一个关于灯塔的故事",
        "老守塔人每晚点灯，从没见过被他照亮的人。一天，一封信漂到岸边，上面只写"
        "着：“多亏有光，我们都到家了。”",
    ),
    Known(
        "How do I cook rice?",
        "Rinse one cup of rice, add one and a half cups of water, bring it to the "
        "boil, cover it and keep the heat low for twelve minutes. Wait ten more "
        "without peeking.",
    ),
    Known(
        "写一首关于大海的诗",
        "海把蓝色折了又折，\n折成浪，折成船的梦。\n贝壳睡着了，\n耳朵里还装着潮声。",
    ),
    Known(
        "Who was Ada Lovelace?",
        "Ada Lovelace was an English mathematician who published, in 1843, a program "
        "for Babbage's Analytical Engine. Many call her the first programmer, although "
        "the machine was never finished.",
    ),
    Known(
        "怎么泡绿茶？",
        "水烧开后放凉到八十度左右，先温杯，再放三克茶叶，倒水泡两分钟就能喝。水太烫，茶会发苦。",
    ),
    Known(
        "What happens to my request, step by step?",
        "First your text becomes token ids. They wait in a queue until a slot is "
        "free. Prefill runs the whole prompt and fills the cache of your slot. "
        "From then on you are one row in every decode step. Each new id travels "
        "back to your thread and turns into text. At the end the slot is handed "
        "on as if it were new memory.",
    ),
)


def questions(count: int) -> list[str]:
    """Returns `count` questions, repeating from the first if there are too few."""
    return [KNOWN[index % len(KNOWN)].question for index in range(count)]
