# %% [markdown] lang="en"
# # Many users at once
#
# Eight threads share one model. Each is a user with questions of its own, and a live plot shows every user's tokens as they arrive. Then the same users ask again, one after the other: every answer has to be the same, and the time is compared.
#
# [中文版](02_many_users_cn.ipynb) · [quick start](01_quick_start.ipynb) · [how it works](../../docs/architecture.md)
# %% [markdown] lang="cn"
# # 许多用户同时使用
#
# 八个线程共用一个模型。每个线程是一个用户，有自己的问题；实时的图显示每个用户收到的词元。然后同样的用户再一个接一个地问一遍：每个回答都必须相同，并比较所用的时间。
#
# [English](02_many_users.ipynb) · [快速上手](01_quick_start_cn.ipynb) · [工作原理](../../docs/architecture.md)
# %%
CHECKPOINT = "ckpt/glm-tiny"  # a folder as it was published; "/cache/chatglm-6b" on ModelArts
DEVICE_TARGET = "CPU"  # or "Ascend"
USERS = 8
QUESTIONS = 4  # that every user asks, one after the other
# %% [markdown] lang="en"
# ## One model for all
# %% [markdown] lang="cn"
# ## 一个模型，所有人共用
# %%
import time
from concurrent.futures import ThreadPoolExecutor, wait
from io import BytesIO

from IPython.display import HTML, Image, display
from matplotlib import colormaps
from matplotlib.figure import Figure

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.cli.questions import KNOWN

bar = display(HTML("loading ..."), display_id=True)


def show_progress(done, total, what):
    bar.update(HTML(f"<progress value='{done}' max='{total}'></progress> {what}"))


llm = MultiUserLLM.from_pretrained(
    CHECKPOINT,
    users=USERS,
    seq_length=256,
    device_target=DEVICE_TARGET,
    progress=show_progress,
)
bar.update(HTML(f"ready for {USERS} users"))
# %% [markdown] lang="en"
# ## A user is a thread
#
# There is no lock and no queue here: `stream_chat` may be called from any thread, and says whose request it is.
# %% [markdown] lang="cn"
# ## 一个用户就是一个线程
#
# 这里没有锁，也没有队列：`stream_chat` 可以在任何线程里调用，只要说明是谁的请求。
# %%
GREEDY = SamplingParams(temperature=0.0, max_tokens=128)


class User:
    """Asks some questions, and notes when each token of the answers arrived."""

    def __init__(self, number, questions):
        self.name, self.questions = f"user {number}", questions
        self.token_ids, self.times, self.text = [], [], ""

    def talk(self):
        for question in self.questions:
            for piece in llm.stream_chat(question, user=self.name, params=GREEDY):
                self.times += [time.perf_counter()] * len(piece.token_ids)
                self.token_ids += piece.token_ids
                self.text += piece.text
            self.text += "\n"


def make_users():
    asked = [known.question for known in KNOWN]  # what glm-tiny knows an answer to
    return [
        User(number + 1, [asked[(number + 5 * turn) % len(asked)] for turn in range(QUESTIONS)])
        for number in range(USERS)
    ]


for user in make_users():
    print(f"{user.name}: {' | '.join(user.questions)}")
# %% [markdown] lang="en"
# ## The picture
#
# One lane per user, filled as high as this user has tokens so far; the number at its end counts them. Time runs to the right.
# %% [markdown] lang="cn"
# ## 作图
#
# 每个用户一条泳道，填充的高度是该用户到目前为止收到的词元数，末端的数字是总数。时间向右流逝。
# %%
COLORS = colormaps["viridis"].resampled(USERS + 1)


class Run:
    """All users, with `threads` of them talking at the same time; drawn while they do."""

    def __init__(self, title, threads):
        self.title, self.threads, self.users = title, threads, make_users()
        self.started = self.ended = time.perf_counter()

    def go(self, picture, runs_before=()):
        with ThreadPoolExecutor(self.threads) as pool:
            self.started = time.perf_counter()
            talking = [pool.submit(user.talk) for user in self.users]
            waiting = talking
            while waiting:
                waiting = wait(waiting, timeout=0.2).not_done
                latest = [user.times[-1] for user in self.users if user.times]
                self.ended = max(latest, default=self.started)
                picture.update(draw([*runs_before, self]))
        for user in talking:
            user.result()  # raises what went wrong in the thread

    @property
    def seconds(self):
        return self.ended - self.started

    @property
    def tokens(self):
        return sum(len(user.times) for user in self.users)


def draw(runs):
    """All runs below each other, on one scale of time."""
    figure = Figure(figsize=(9, 0.4 + 3.4 * len(runs)), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    panels = figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0]
    most = max((len(user.times) for run in runs for user in run.users), default=0) or 1
    for run, axes in zip(runs, panels):
        rate = run.tokens / run.seconds if run.seconds else 0.0
        draw_lanes(axes, run, most)
        axes.set_title(run.title, loc="left", fontsize=12, fontweight="bold")
        numbers = f"{run.tokens} tokens in {run.seconds:.1f} s = {rate:.0f} tokens per second"
        axes.set_title(numbers, loc="right", fontsize=11, color="0.35")
    panels[-1].set_xlim(0, 1.06 * max([run.seconds for run in runs] + [0.1]))
    panels[-1].set_xlabel("seconds since the first question")
    png = BytesIO()
    figure.savefig(png, format="png")
    return Image(png.getvalue(), width=900)


def draw_lanes(axes, run, most):
    for lane, user in enumerate(run.users):
        base = USERS - lane
        # More tokens may have come since: a number right of the picture would leave it no room.
        times = [moment - run.started for moment in list(user.times) if moment <= run.ended]
        axes.axhline(base, color="0.88", linewidth=0.8, zorder=0)
        if not times:
            continue
        heights = [base + 0.86 * count / most for count in range(1, len(times) + 1)]
        axes.fill_between(times, base, heights, step="post", color=COLORS(lane), linewidth=0)
        label = f" {len(times)}"
        axes.text(times[-1], base + 0.1, label, color=COLORS(lane), fontsize=9, weight="bold")
    axes.set_yticks(
        [USERS - lane + 0.35 for lane in range(USERS)], [user.name for user in run.users]
    )
    axes.set_ylim(0.9, USERS + 1)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
# %% [markdown] lang="en"
# ## Together
#
# Everybody starts at the same moment. All lanes grow together: one decode step makes the next token of every user.
# %% [markdown] lang="cn"
# ## 一起问
#
# 所有人同时开始。所有泳道一起增长：一个解码步为每个用户生成下一个词元。
# %%
together = Run("together", threads=USERS)
together.go(display(draw([together]), display_id=True))
# %% [markdown] lang="en"
# ## One after the other
#
# The same users, questions and model, but each user asks after the one before has all answers.
# %% [markdown] lang="cn"
# ## 一个接一个
#
# 同样的用户、同样的问题、同样的模型，但前一个人得到全部回答之后，下一个人才开始问。
# %%
alone = Run("one after the other", threads=1)
alone.go(display(draw([together, alone]), display_id=True), runs_before=[together])
# %% [markdown] lang="en"
# ## The proof
#
# Token for token, no answer depends on who else is active. The speed-up includes the drawing, which runs on the same processor when the model runs on the CPU; `glm-multiuser demo` does the same in a terminal, without drawing. On a CPU that others use, too, it is different each time.
# %% [markdown] lang="cn"
# ## 证明
#
# 逐个词元比较：没有人的回答取决于当时还有谁在场。加速比里包含了作图的开销：模型在 CPU 上运行时，作图用的是同一个处理器；`glm-multiuser demo` 在终端里做同样的事，不作图。如果 CPU 上还有别人的任务，每次的结果都会不同。
# %%
pairs = list(zip(together.users, alone.users))
same = sum(one.token_ids == other.token_ids for one, other in pairs)
print(f"{same} of {USERS} users have identical answers together and alone")
assert same == USERS, "please report this: it is what this library promises"

print(f"together {together.seconds:.1f} s, one after the other {alone.seconds:.1f} s", end=": ")
print(f"{alone.seconds / together.seconds:.1f} times as fast")
print(f"graphs compiled after ready: {llm.stats().compiles_after_ready}")
print(f"\nwhat {together.users[0].name} read:\n{together.users[0].text}")
llm.close()
# %% [markdown] lang="en"
# Next: [measuring a card](03_measuring_a_card.ipynb). The same as a program: [multi_thread_benchmark.py](../multi_thread_benchmark.py).
# %% [markdown] lang="cn"
# 接下来：[测量一张卡](03_measuring_a_card_cn.ipynb)。程序形式：[multi_thread_benchmark.py](../multi_thread_benchmark.py)。
