# %% [markdown] lang="en"
# # Quick start
#
# One model, many users: load it, chat, keep a history, stream, ask for two users at once, repeat a random answer, and see what an error says. On a CPU with the [native kernels](../../docs/native.md) this takes a few seconds.
#
# [中文版](01_quick_start_cn.ipynb) · [README](../../README.md) · [every name and parameter](../../docs/api.md)
# %% [markdown] lang="cn"
# # 快速上手
#
# 一个模型，许多用户：加载模型、对话、保留历史、流式输出、两个用户同时提问、重现随机的回答，以及看看出错时会说什么。在装有[原生内核](../../docs/native.md)的 CPU 上只需要几秒钟。
#
# [English](01_quick_start.ipynb) · [README](../../README_CN.md) · [全部名称与参数](../../docs/api.md)
# %%
CHECKPOINT = "ckpt/glm-tiny"  # a folder as it was published; "/cache/chatglm-6b" on ModelArts
DEVICE_TARGET = "CPU"  # or "Ascend"
USERS = 4  # that decode concurrently
SEQ_LENGTH = 512  # maximum tokens per user, prompt and answer together
# %% [markdown] lang="en"
# ## Load
#
# `from_pretrained` reads the weights and compiles every graph. After it returns nothing is compiled, however many users there are.
# %% [markdown] lang="cn"
# ## 加载
#
# `from_pretrained` 读取权重并编译所有的图。它返回之后，无论来多少用户，都不会再编译任何东西。
# %%
from IPython.display import HTML, display

from glm_multiuser import MultiUserLLM, PromptTooLongError, SamplingParams

bar = display(HTML("loading ..."), display_id=True)


def show_progress(done, total, what):
    bar.update(HTML(f"<progress value='{done}' max='{total}'></progress> {what}"))


llm = MultiUserLLM.from_pretrained(
    CHECKPOINT,
    users=USERS,
    seq_length=SEQ_LENGTH,
    device_target=DEVICE_TARGET,
    progress=show_progress,
)
bar.update(HTML("ready"))
stats = llm.stats()
print(f"{stats.users} users, {stats.kernels} kernels, {stats.compiles} graph(s) compiled")
print(f"keys and values of one user: {stats.cache_bytes_per_user / 2**20:.1f} MiB")
# %% [markdown] lang="en"
# ## Chat
#
# Every call names its user, by a number or a text.
# %% [markdown] lang="cn"
# ## 对话
#
# 每次调用都要说明是哪个用户：一个数字，或一段文字。
# %%
answer, history = llm.chat("你是谁", user="alice")
print(answer)
answer, history = llm.chat("Who are you?", user="bob")
print(answer)
# %% [markdown] lang="en"
# ## History
#
# `chat` returns the history to pass next time. You keep it: a list of questions and answers. The model sees what you pass.
# %% [markdown] lang="cn"
# ## 历史
#
# `chat` 会返回下一次要传入的历史。历史由您保管：它是问答的列表，您传入什么，模型就看到什么。
# %%
history = []
for question in (
    "I am reading about Saturn",
    "Does it have moons?",
    "Tell me about the largest one",
):
    answer, history = llm.chat(question, history=history, user="alice")
    print(f"> {question}\n{answer}\n")
print(f"{len(history)} rounds in the history")
# %% [markdown] lang="en"
# ## Stream
#
# `stream_chat` gives the text as it becomes final. Leaving the loop early cancels the request.
# %% [markdown] lang="cn"
# ## 流式输出
#
# `stream_chat` 在文字确定下来时就把它交给您。提前离开循环会取消这个请求。
# %%
for piece in llm.stream_chat("讲一个关于灯塔的故事", user="alice"):
    print(piece.text, end="", flush=True)
print(f"\n\nfinished because: {piece.finish_reason}")
# %% [markdown] lang="en"
# ## Two users at once
#
# `submit` returns at once, and both requests go through the same decode steps. Threads and asyncio work just as well: [02_many_users](02_many_users.ipynb) uses threads.
# %% [markdown] lang="cn"
# ## 两个用户同时提问
#
# `submit` 立即返回，两个请求走同样的解码步。用线程或 asyncio 也可以：[02_many_users](02_many_users_cn.ipynb) 用的是线程。
# %%
asked = {"alice": "Write a poem about rain", "bob": "怎么做番茄炒蛋？"}
running = {user: llm.submit(question, user=user) for user, question in asked.items()}
for user, handle in running.items():
    result = handle.result(timeout=600)
    print(f"{user}: {asked[user]}\n{result.text}")
    print(f"({result.usage.completion_tokens} tokens, {result.finish_reason})\n")
# %% [markdown] lang="en"
# ## Seeds
#
# With a `temperature`, answers are drawn at random. A `seed` repeats one: with the same seed the tokens are the same, whoever else is active.
# %% [markdown] lang="cn"
# ## 随机种子
#
# 设置 `temperature` 后，回答是随机抽取的。`seed` 可以重现它：种子相同，词元就相同，无论同时还有谁在用。
# %%
for seed in (1, 4, 1):
    params = SamplingParams(temperature=1.0, top_k=5, seed=seed, max_tokens=64)
    print(f"seed {seed}: {llm.submit('Tell me a joke', params=params).result(timeout=600).text}")
# %% [markdown] lang="en"
# ## An error
#
# A request that cannot work is rejected before it enters the engine; the message names the value and the limit. Other users are not affected.
# %% [markdown] lang="cn"
# ## 出错时
#
# 不可能完成的请求在进入引擎之前就会被拒绝，错误信息会说明数值和上限。其他用户不受影响。
# %%
try:
    llm.chat("lighthouse " * SEQ_LENGTH, user="alice")
except PromptTooLongError as error:
    print(f"{type(error).__name__}: {error}")
# %% [markdown] lang="en"
# ## Close
#
# `close` lets running requests end, and frees the graphs. In a program, write `with MultiUserLLM.from_pretrained(...) as llm:` instead.
# %% [markdown] lang="cn"
# ## 关闭
#
# `close` 让正在进行的请求结束，并释放图。在程序里，请改写成 `with MultiUserLLM.from_pretrained(...) as llm:`。
# %%
stats = llm.stats()
print(f"{stats.tokens_generated} tokens generated in {stats.steps} steps")
print(f"graphs compiled after ready: {stats.compiles_after_ready}")
llm.close()
# %% [markdown] lang="en"
# Next: [many users at once, with a live plot](02_many_users.ipynb), [measuring a card](03_measuring_a_card.ipynb). As programs: [a benchmark with threads](../multi_thread_benchmark.py), [clients of the server](../clients).
# %% [markdown] lang="cn"
# 接下来：[许多用户同时使用，实时作图](02_many_users_cn.ipynb)、[测量一张卡](03_measuring_a_card_cn.ipynb)。程序形式的例子：[多线程基准测试](../multi_thread_benchmark.py)、[服务器的客户端](../clients)。
