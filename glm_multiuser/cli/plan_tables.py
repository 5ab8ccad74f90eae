"""The tables of `glm-multiuser plan`."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from glm_multiuser.cli.roofline import DecodeStep

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def memory_table(title: str, plan: dict[str, Any]) -> Table:
    """Builds the table of memory use and of the users that fit."""
    dtype = plan["weight_dtype"]
    users = max(plan["users"], 1)
    limit, available = plan["cache_memory"], plan["device_bytes"]
    binding = limit if plan["cache_bytes"] == limit else available
    budget = {} if limit is None else {"caches of all users (cache-memory)": size(limit)}
    rows = {
        "weights": f"{millions(plan['weight_count'])} in {dtype}, {size(plan['weight_bytes'])}",
        "keys and values per token": f"{size(plan['bytes_per_token'])} in {plan['cache_dtype']}",
        f"per user of {plan['seq_length']} tokens": size(plan["bytes_per_user"]),
        **budget,
        "zeros that overwrite used memory": size(plan["zeros_bytes"]),
        f"workspace of {users} users (estimate)": size(plan["workspace_bytes"]),
        f"all of that with {users} users": size(plan["total_bytes"]),
        f"users in {size(binding)}": str(plan["users"]),
        "tokens of all of them": f"{plan['tokens']:,}",
    }
    table = Table("", title, title=f"memory, {plan['kernels']} kernels")
    for row in rows.items():
        table.add_row(*row)
    for column in table.columns:
        column.overflow = "fold"
    table.caption = caption(plan)
    return table


def caption(plan: dict[str, Any]) -> str:
    """Returns the notes below the numbers."""
    if plan["kernels"] == "native":
        return "Held against measured memory in docs/planning.md."
    if plan["target"] == "CPU":
        return "On a CPU, MindSpore's own operators take gigabytes more: see docs/planning.md."
    return "The workspace was not measured on any card."


def start_up(plan: dict[str, Any]) -> str:
    """Describes what is compiled, and when."""
    graphs = plan["graphs"]
    each = ", ".join(f"{count} to {what}" for what, count in graphs.items())
    return (
        f"Start-up compiles {sum(graphs.values())} graphs for {max(plan['users'], 1)} users, "
        f"whatever they ask: {each}. All of them before the first request, none later."
    )


def does_not_fit(model: str, device: str, plan: dict[str, Any]) -> str:
    """Explains a plan without users."""
    return (
        f"{model} does not fit on {device}: with one user of {plan['seq_length']} tokens it takes "
        f"{size(plan['total_bytes'])}, and there are {size(plan['device_bytes'])}."
    )


def roofline_table(steps: "list[DecodeStep]", context: int) -> Table:
    """Builds the table of bounds of a step and of all users' tokens per second."""
    table = Table("users", "reads", "ms per step", "tok/s", "tok/s per user", "bound by")
    table.title = f"roofline of a decode step, {context} tokens each: at best, no forecast"
    for column in table.columns[:-1]:
        column.justify = "right"
    for step in steps:
        table.add_row(
            str(step.users),
            size(step.bytes_read),
            f"{1000 * step.seconds:.2f}",
            f"{step.tokens_per_second:,.0f}",
            f"{step.tokens_per_second / step.users:,.1f}",
            step.bound,
        )
    return table


def sweep_table(found: list[dict[str, Any]]) -> Table:
    """Builds the table with the plot's numbers."""
    table = Table("tokens per user", "users that fit", "tok/s of all at best")
    for column in table.columns:
        column.justify = "right"
    for one in found:
        rate = one["tokens_per_second"]
        table.add_row(
            f"{one['seq_length']:,}", str(one["users"]), "" if rate is None else f"{rate:,.0f}"
        )
    return table


def heading(model: str, device: str, plan: dict[str, Any]) -> str:
    """Returns the plot's title, with the conditions of the plan."""
    return (
        f"{model} on {device}, {size(plan['device_bytes'])}: weights {plan['weight_dtype']}, "
        f"caches {plan['cache_dtype']}, {size(plan['bytes_per_token'])} per token\n"
        "computed from shapes and published peaks, nothing measured on a card"
    )


def millions(count: int) -> str:
    """Formats a number of weights, in billions from 1e9."""
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def size(count: int) -> str:
    """Formats bytes in the largest unit with a value of at least one."""
    for unit, number in UNITS.items():
        if count >= number:
            return f"{count / number:.4g} {unit}"
    return f"{count} B"
