"""Stub libraries in place of CANN's, with which MindSpore loads its Ascend plugin.

They are generated from the names that MindSpore's own libraries leave undefined or look up, and
contain no CANN code: a function returns 0, or what `stubs.cpp` defines.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent

PLUGIN = (
    *("plugin/libmindspore_ascend.so.2", "plugin/libmindspore_ops_ascend.so"),
    *("plugin/ascend/libd_collective.so", "plugin/ascend/libmindspore_ascend_res_manager.so"),
    *("plugin/ascend/libmindspore_graph_ir.so", "plugin/ascend/libhccl_plugin.so"),
    "libmindspore_ge_backend.so",
)
"""MindSpore's libraries that depend on CANN."""

CANN = (
    *("acl_dvpp_mpi", "acl_dvpp_op", "acl_op_compiler", "acl_tdt_channel", "aoe_executor"),
    *("ascend_hal", "cann_kb", "compress", "dummy_tls", "error_manager", "ge_runner", "graph"),
    *("hccl", "hcom_graph_adaptor", "hcom_opskernel_builder", "host_cpu_engine", "msprofiler"),
    *("nnopbase", "opapi", "opskernel", "platform", "ra", "register", "slice"),
)
"""CANN libraries beside libascendcl.so, which has the functions of all of them here."""

SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1")

RUNTIME = re.compile(r"_?Py|_ITM|__cxa|__gmon")
"""Names that do not come from CANN."""

LOOKED_UP = re.compile(
    rb"\x00(acl[A-Za-z0-9_]{3,80}|\w*(?:HugeMem|ThreadLocal|PTA\w*|CachedList))(?=\x00)"
)
"""Names of functions that MindSpore looks up at run time, as stored in its libraries."""

CREATES = re.compile(r"aclCreate")
RETURNS_ITSELF = re.compile(
    r"_ZN2ge8Operator(7SetAttr|8SetInput|15AddControlInput)"
    r"|_ZN2ge5Graph(9SetInputs|10SetOutputs|17SetNeedIteration)"
)

CODE = {
    "zero": "xorl %eax, %eax; pxor %xmm0, %xmm0; ret",
    "object": "movq stub_object@GOTPCREL(%rip), %rax; ret",
    "itself": "movq %rdi, %rax; ret",
}


class DryRunError(Exception):
    """This machine or this MindSpore does not support the dry run."""


def mindspore_libraries() -> Path:
    """The folder of MindSpore's libraries, found without importing it.

    Raises:
        DryRunError: its wheel has no Ascend plugin.
    """
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        raise DryRunError("MindSpore is not installed")
    folder = Path(spec.origin).parent / "lib"
    missing = [name for name in PLUGIN if not (folder / name).is_file()]
    if missing:
        raise DryRunError(f"this wheel of MindSpore has no {', '.join(missing)}")
    return folder


def build(folder: Path) -> Path:
    """Writes all libraries below `folder`.

    Returns:
        Their folder; MindSpore expects this suffix of CANN's path.

    Raises:
        DryRunError: there is no compiler, or this is not x86.
    """
    if platform.machine() != "x86_64":
        raise DryRunError(f"the stubs are for x86_64, this is {platform.machine()}")
    missing = [tool for tool in ("g++", "nm") if not shutil.which(tool)]
    if missing:
        raise DryRunError(f"there is no {' and no '.join(missing)}")
    libraries, out = mindspore_libraries(), folder / "cann" / "lib64"
    out.mkdir(parents=True)
    own = out / "stubs.o"
    compile_cpp("-c", "-o", own, HERE / "stubs.cpp")
    assembly = out / "stubs.S"
    names = needed_names(libraries) - symbols(own, "--defined-only")
    assembly.write_text(assembly_of(names), encoding="utf-8")
    all_functions = out / "libascendcl.so"
    soname = "-Wl,-soname,libascendcl.so"
    compile_cpp("-shared", "-o", all_functions, soname, assembly, own)
    for name in CANN:
        # Under its own name, and with the functions that it only references.
        library = out / f"lib{name}.so"
        options = (f"-Wl,-soname,{library.name}", "-Wl,--no-as-needed")
        compile_cpp("-shared", "-o", library, *options, all_functions)
    linked = ("-Wl,--no-as-needed", "-l:libmindspore_common.so", "-l:libmindspore_core.so")
    undefined = "-Wl,--unresolved-symbols=ignore-all"
    source = HERE / "soc.cpp"
    compile_cpp("-shared", "-o", out / "libsoc.so", source, f"-L{libraries}", *linked, undefined)
    return out


def compile_cpp(*arguments: str | Path) -> None:
    """Compiles with the std::string ABI of MindSpore and CANN."""
    options = ("-fPIC", "-O1", "-D_GLIBCXX_USE_CXX11_ABI=0")
    result = subprocess.run(["g++", *options, *arguments], capture_output=True, text=True)
    if result.returncode:
        raise DryRunError(f"g++ says: {result.stderr}")


def needed_names(libraries: Path) -> set[str]:
    """Every function that only CANN provides."""
    plugin = [libraries / name for name in PLUGIN]
    undefined = set[str]().union(*(symbols(path, "-u") for path in plugin))
    looked_up = {name.decode() for path in plugin for name in LOOKED_UP.findall(path.read_bytes())}
    operators = {name for name in looked_up if name.startswith("aclnn")}
    looked_up |= {
        f"{name}GetWorkspaceSize" for name in operators if not name.endswith("GetWorkspaceSize")
    }
    others = {*plugin, *libraries.glob("libmindspore_*.so*")}
    defined = set[str]().union(*(symbols(path, "--defined-only") for path in others))
    names = {name for name in undefined if not RUNTIME.match(name)} | looked_up
    system = [ctypes.CDLL(name) for name in SYSTEM]
    return {name for name in names - defined if not any(hasattr(one, name) for one in system)}


def symbols(path: Path, kind: str) -> set[str]:
    """The names that a library defines or leaves undefined, without weak ones."""
    dynamic = [] if path.suffix == ".o" else ["-D"]
    command = ["nm", *dynamic, kind, str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [line.split()[-2:] for line in text.splitlines()]
    return {name.partition("@")[0] for letter, name in found if letter != "w"}


def assembly_of(names: set[str]) -> str:
    """Generates one of three functions per name."""
    groups: dict[str, list[str]] = {kind: [] for kind in CODE}
    for name in sorted(names):
        kind = (
            "object" if CREATES.match(name) else "itself" if RETURNS_ITSELF.match(name) else "zero"
        )
        groups[kind].append(name)
    lines = ['.section .note.GNU-stack,"",@progbits', ".text"]
    for kind, members in groups.items():
        for name in members:
            lines += [f".globl {name}", f".type {name}, @function", f"{name}:"]
        lines.append(CODE[kind])
    return "\n".join(lines) + "\n"


def environment(stubs: Path, **variables: str) -> dict[str, str]:
    """Environment of a process with a simulated Ascend card; `stubs` as returned by `build`."""
    path = f"{stubs}:{mindspore_libraries() / 'plugin' / 'ascend'}"
    return {
        **os.environ,
        "LD_LIBRARY_PATH": path,
        "MS_SIMULATION_LEVEL": "1",  # kernels are chosen and memory is laid out; 0 stops before
        "GLOG_v": "2",
        "MS_SUBMODULE_LOG_v": "{DEVICE:1}",  # logs the selected kernels
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def start(stubs: Path, soc: str, jit_level: str) -> None:
    """Simulates a card in this process; call before anything is compiled.

    Args:
        soc: "ascend910" or "ascend910b".
        jit_level: "O0" selects a kernel per operator, "O2" builds a graph for GE.
    """
    import mindspore as ms

    from glm_multiuser import device

    ms.set_context(jit_config={"jit_level": jit_level})
    device.configure("Ascend", 0)
    ctypes.CDLL(str(stubs / "libsoc.so")).set_soc(soc.encode())
