# %% [markdown] lang="en"
# # Measuring a card
#
# What to run on a new device, in this order: `selfcheck` says whether it computes the right thing, `bench` how fast, and `plan` how many users fit. At the end there is a report to paste into an issue.
#
# **Nobody has measured this version on an Ascend card.** If you do, your report is the first: [docs/ascend.md](../../docs/ascend.md) says what is untested and what is unknown.
#
# [中文版](03_measuring_a_card_cn.ipynb) · [quick start](01_quick_start.ipynb) · [how the numbers are made](../../docs/benchmarks.md)
# %% [markdown] lang="cn"
# # 测量一张卡
#
# 在一台新设备上要运行的东西，按顺序是：`selfcheck` 检查算得对不对，`bench` 测量有多快，`plan` 计算能容纳多少用户。最后会生成一份可以贴到 issue 里的报告。
#
# **还没有人在昇腾卡上测量过这个版本。** 如果您测了，您的报告就是第一份：[docs/ascend.md](../../docs/ascend.md) 说明了哪些还没有测试过，哪些还不知道。
#
# [English](03_measuring_a_card.ipynb) · [快速上手](01_quick_start_cn.ipynb) · [这些数字是怎么来的](../../docs/benchmarks.md)
# %%
CHECKPOINT = "ckpt/glm-tiny"  # a folder as it was published; "/cache/chatglm-6b" on ModelArts
DEVICE_TARGET = "CPU"  # or "Ascend"
SEQ_LENGTH = 1024  # maximum tokens per user, prompt and answer together
# %% [markdown] lang="en"
# ## The command
#
# This notebook runs the command `glm-multiuser`, which you can also run in a terminal. It has a process of its own, so the notebook holds no device. The function below shows its progress and returns what it prints.
# %% [markdown] lang="cn"
# ## 命令
#
# 本 notebook 运行命令 `glm-multiuser`，您也可以在终端里运行它。它有自己的进程，所以 notebook 不占用设备。下面的函数显示它的进度，并返回它的输出。
# %%
import json
import tempfile
from io import BytesIO

from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure


def cli(*arguments):
    """Runs `glm-multiuser` with this notebook's own Python."""
    print("$ glm-multiuser", *arguments)
    command = [sys.executable, "-m", "glm_multiuser.cli", *map(str, arguments)]
    settings = {**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}
    settings.pop("FORCE_COLOR", None)  # Jupyter sets it; the outputs here stay plain text
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        with subprocess.Popen(
            command, stdout=output, stderr=subprocess.PIPE, encoding="utf-8", env=settings
        ) as running:
            for line in running.stderr:
                print(line, end="", flush=True)
        output.seek(0)
        printed = output.read()
    if running.returncode:
        raise RuntimeError(f"it ended with code {running.returncode}\n{printed}")
    return printed
# %% [markdown] lang="en"
# ## Is it right?
#
# `selfcheck` compares with stored values of the original PyTorch code, with known answers, and each of eight users with the same user alone. If a check fails on your device, this cell raises; please report the table that it shows.
# %% [markdown] lang="cn"
# ## 算得对吗？
#
# `selfcheck` 与原始 PyTorch 代码的存档数值比较，与已知的答案比较，并把八个用户中的每一个与其单独运行时比较。如果在您的设备上有检查失败，这个单元格会报错；请把它显示的表格报告给我们。
# %%
golden = ("--golden", "tests/golden/chatglm_6b_3layers")  # values of the original PyTorch code
checks = cli("selfcheck", *golden, "--device-target", DEVICE_TARGET)
print(checks)
# %% [markdown] lang="en"
# ## How fast?
#
# `bench` measures 1, 2, 4 and 8 users, each number in a process of its own. Prompts have 16 tokens, answers 128; rates are the median of three rounds. Nothing else should run on the machine: the load average is among the conditions.
# %% [markdown] lang="cn"
# ## 有多快？
#
# `bench` 测量 1、2、4、8 个用户，每种用户数在各自的进程里运行。提示为 16 个词元，回答为 128 个；速率取三轮的中位数。机器上不应有其他任务：测量条件里记录了平均负载。
# %%
line = cli(
    *("bench", "--users", "1,2,4,8", "--repeat", 3, "--no-plot"),
    *("--checkpoint", CHECKPOINT, "--seq-length", SEQ_LENGTH, "--device-target", DEVICE_TARGET),
).splitlines()[-1]
bench = json.loads(line)

table = "| users | tok/s | tok/s per user | first token, p50 ms | next token, p50 ms | peak MB |\n"
table += "| ---: " * 6 + "|\n"
for run in bench["runs"]:
    table += f"| {run['users']} | {run['tok_s']:.0f} | {run['tok_s'] / run['users']:.0f} "
    table += f"| {run['ttft_ms']['p50']:.1f} | {run['itl_ms']['p50']:.1f} "
    table += f"| {run['peak_rss_mb']:.0f} |\n"
display(Markdown(table))
# %% [markdown] lang="en"
# More users share each pass over the weights, so together they get more tokens per second, and each of them somewhat fewer. Memory grows only by the keys and values of the users. `peak MB` is memory of the host: on Ascend, read the device's from `npu-smi info` while the benchmark runs.
# %% [markdown] lang="cn"
# 更多的用户分享每一次对权重的读取，所以所有人合计每秒得到更多词元，而每个人稍少一些。内存随用户数增长的部分只有他们的键和值。`peak MB` 是主机内存：在昇腾上，请在测量时用 `npu-smi info` 查看设备内存。
# %%
users = [run["users"] for run in bench["runs"]]
total = [run["tok_s"] for run in bench["runs"]]
memory = [run["peak_rss_mb"] for run in bench["runs"]]
per_user = (memory[-1] - memory[0]) / (users[-1] - users[0])
panels = {
    "all users together": (total, "tokens per second", "tab:blue"),
    "each user": ([rate / n for rate, n in zip(total, users)], "tokens per second", "tab:orange"),
    f"memory: {per_user:.1f} MiB per user": (memory, "peak of the process, MiB", "tab:green"),
}

figure = Figure(figsize=(11, 3.6), dpi=150, layout="constrained")
for axes, (title, (values, unit, color)) in zip(figure.subplots(1, 3), panels.items()):
    axes.plot(users, values, "-o", color=color)
    for place, value in zip(users, values):
        axes.annotate(
            f"{value:.0f}", (place, value), (0, 8), textcoords="offset points", ha="center"
        )
    axes.set_title(title, fontsize=11, fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, users)
    axes.set(xlabel="users (log scale)", ylabel=unit, ylim=(0, 1.2 * max(values)))
    axes.margins(x=0.1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
png = BytesIO()
figure.savefig(png, format="png")
display(Image(png.getvalue(), width=1000))
# %% [markdown] lang="en"
# For `ckpt/glm-tiny` on a CPU, one user's keys and values are 2 × 4 layers × 256 numbers × 1024 tokens × 4 bytes = 8 MiB. With MindSpore's operators, that is about the slope of the third plot. Native kernels on Linux take memory [for the tokens in a cache only](../../docs/engine.md): here for 16 + 128 of 1024, 1.1 MiB.
#
# ## How many users fit?
#
# `plan` computes it from a model's shape: a checkpoint folder, or the name of a published model, which does not have to be here. This is ChatGLM-6B on a card of 32 GiB. It is arithmetic from published figures: nobody has measured it on a card, and `tok/s` there are the most that the card's memory and arithmetic allow.
# %% [markdown] lang="cn"
# 对于 CPU 上的 `ckpt/glm-tiny`，一个用户的键和值占 2 × 4 层 × 256 个数 × 1024 个词元 × 4 字节 = 8 MiB。用 MindSpore 的算子时，第三张图的斜率大约就是这个数。Linux 上的[原生内核](../../docs/native.md)[只为缓存中的词元占用内存](../../docs/engine.md)：这里是 1024 个中的 16 + 128 个，即 1.1 MiB。
#
# ## 能容纳多少用户？
#
# `plan` 根据模型的形状计算：可以是权重文件夹，也可以是已发布模型的名字（不需要有权重）。这里是 32 GiB 卡上的 ChatGLM-6B。这只是根据公开数据的算术：还没有人在卡上测量过，其中的 `tok/s` 是卡的内存和算力所允许的上限。
# %%
model = "chatglm-6b"  # or CHECKPOINT
print(cli("plan", "--model", model, "--device-memory", "32GiB", "--seq-length", SEQ_LENGTH))
# %% [markdown] lang="en"
# ## The report
#
# Open an issue with what the next cell prints, good or bad. From an Ascend card, please add:
#
# - the card and its driver (`npu-smi info`), the CANN version, and the name of the ModelArts image;
# - the memory of the device with 1 and with 8 users;
# - how long the first start took, and the second;
# - the complete error message, if there was one.
# %% [markdown] lang="cn"
# ## 报告
#
# 请用下一个单元格的输出新建一个 issue，结果好坏都欢迎。如果来自昇腾卡，请再附上：
#
# - 卡和驱动（`npu-smi info`）、CANN 版本、ModelArts 镜像的名字；
# - 1 个和 8 个用户时的设备内存；
# - 第一次和第二次启动各用了多久；
# - 完整的错误信息（如果有）。
# %%
print(checks)
print(line)
