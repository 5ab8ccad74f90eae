# %% [markdown] lang="en"
# ## Where are we?
#
# The next cell finds the clone of the repository that this notebook is in, and installs it unless it is installed: without root, and without replacing a MindSpore that is there. The installation takes one to four minutes. The cell also says what it found: `/cache`, the fast local disk of ModelArts, and the devices of Ascend cards.
# %% [markdown] lang="cn"
# ## 我们在哪里？
#
# 下面的单元格会找到本 notebook 所在的仓库；如果还没有安装，就把它装上：不需要 root，也不会替换已有的 MindSpore。安装需要一到四分钟。它还会报告找到了什么：`/cache`（ModelArts 的高速本地盘），以及昇腾卡的设备文件。
# %%
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path.cwd()
CLONE = next((one for one in (HERE, *HERE.parents) if (one / "ckpt/glm-tiny").is_dir()), None)
if CLONE is None:
    raise FileNotFoundError(f"no ckpt/glm-tiny above {HERE}: open this notebook inside a clone")

if importlib.util.find_spec("glm_multiuser") is None:
    print("installing glm_multiuser ...")
    there = importlib.util.find_spec("mindspore") is not None
    keep = [f"mindspore=={version('mindspore')}"] if there else []  # it fits the CANN of its image
    pip = [sys.executable, "-m", "pip", "install", "-q", "-e", str(CLONE), *keep]
    subprocess.run(pip, check=True)
    sys.path.insert(0, str(CLONE))  # at once; the next start of the kernel finds it by itself
os.chdir(CLONE)  # from here on, paths are those of the README

place = "ModelArts, or something with a /cache" if Path("/cache").is_dir() else "a local clone"
cards = len(list(Path("/dev").glob("davinci[0-9]*")))
print(f"this is {place}; Ascend devices: {cards or 'none'}")
print(f"glm_multiuser {version('glm_multiuser')}, mindspore {version('mindspore')}")
# %% [markdown] lang="en"
# ## Settings
#
# **This is the only cell to edit.** `ckpt/glm-tiny` comes with the repository: a model of ChatGLM-6B's architecture with 4 million parameters, which knows about 300 answers by heart. On ModelArts, copy the weights from object storage to `/cache` first, for example with `moxing.file.copy_parallel("obs://your-bucket/chatglm-6b", "/cache/chatglm-6b")`, and set `CHECKPOINT = "/cache/chatglm-6b"` and `DEVICE_TARGET = "Ascend"`. Nobody has run this on an Ascend card yet: [docs/ascend.md](../../docs/ascend.md).
# %% [markdown] lang="cn"
# ## 设置
#
# **只需要修改这一个单元格。** `ckpt/glm-tiny` 随仓库提供：结构与 ChatGLM-6B 相同，四百万参数，能背出大约三百个答案。在 ModelArts 上，请先把权重从对象存储复制到 `/cache`，例如 `moxing.file.copy_parallel("obs://your-bucket/chatglm-6b", "/cache/chatglm-6b")`，然后设置 `CHECKPOINT = "/cache/chatglm-6b"` 和 `DEVICE_TARGET = "Ascend"`。还没有人在昇腾卡上运行过：见 [docs/ascend.md](../../docs/ascend.md)。
