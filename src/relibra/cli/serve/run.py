"""`relibra serve MODEL`: start the workers of a model and answer requests over HTTP."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from relibra.cli.inputs.requests import takes, within
from relibra.cli.outputs.files import check_outputs, named
from relibra.cli.outputs.terminal import print_note
from relibra.cli.serve.plan import open_served_model
from relibra.environment import uncollected_imports
from relibra.errors import ConfigError, missing_packages

INSTALL = "in the checkout, pip install -e '.[train,serve]'"


def planned_workers(path: Path, model: Path) -> dict[str, int]:
    """Return options for a worker per node of a plan; raises PlanError, or ConfigError for a plan of another model."""
    from relibra.planning.deployment.deployment_files import read_deployment

    plan, served = read_deployment(path), open_served_model(str(model))
    sizes = [(item.layers, item.experts, item.top_k, item.hidden) for item in (plan.model, served)]
    if sizes[0] != sizes[1]:
        planned, found = (f"{L} layers, {K} of {E} experts, hidden {H}" for L, E, K, H in sizes)
        raise ConfigError(
            f"--plan {path} is of {plan.model.name!r} ({planned}), {model} has {found}: make a plan of this model with "
            f"relibra serve plan {model} --output FILE"
        )
    return {
        "attention": plan.attention.nodes, "experts": plan.experts.nodes, "micro_batches": plan.micro_batches
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """A model, its workers, and the server before them.

    model  Folder of a transformers MoE model, written by save_pretrained.
    plan FILE  Plan of relibra serve plan --output: a worker for each node, its micro-batches.
    placement FILE  Experts of each worker, of relibra serve place --output: its workers, copies and cap.
    record FOLDER  Write the routes of answers as a trace; they tell what requests were about.
    attention  Attention workers; default: those of --plan, else 1.
    experts  Expert workers; each holds some experts of every layer. Default: those of --placement or --plan, else 1.
    spare_experts  Experts of a layer that a worker holds beyond its share: copies, which answer where one is lost.
    rebalance_seconds  Time after which copies go to the experts of each layer with the most choices since; 0: never.
    micro_batches  Micro-batches of each attention worker, 1 to 4; default: those of --plan, else 2.
    transport  Rows between workers: shared (memory that both map) or tcp.
    host  Address to listen at.
    port  Port to listen at; 0: any that is free.
    name  Name of the model for clients; default: that of its folder.
    dtype  Of the weights: auto, float32, bfloat16, float16.
    max_batch  Requests that an attention worker decodes at once.
    max_length  Most tokens of a request, prompt and answer; default: 4096, or the positions of the model.
    max_tokens  Most tokens of one forward pass.
    kv_tokens  Tokens of the KV cache of an attention worker.
    threads  Threads of torch per worker; 0: cores / workers.
    timeout  Seconds that attention and experts wait for one another.
    api_key_from  Where keys of clients are: env:NAME, or file:PATH with one per line.
    max_waiting  Most answers in the queue; more get status 429.
    deadline  Seconds that a request may take, waiting included.
    updates FOLDER  Let clients load other weights from folders below it, by vLLM's requests.
    timeline  Write what each worker did, and when, for Perfetto in the end.
    until_eof  Stop when the standard input ends.
    """

    model: Annotated[Path, typer.Argument()]
    plan: Path | None = None
    placement: Path | None = None
    record: Path | None = None
    attention: Annotated[int | None, within(1)] = None
    experts: Annotated[int | None, within(1)] = None
    spare_experts: int | None = None
    rebalance_seconds: float = 0.0
    micro_batches: Annotated[int | None, within(1)] = None
    transport: str = "shared"
    host: str = "127.0.0.1"
    port: Annotated[int, within(0, 65535)] = 8100
    name: str = ""
    dtype: str = "auto"
    max_batch: int = 64
    max_length: Annotated[int | None, within(1)] = None
    max_tokens: int = 512
    kv_tokens: int = 65536
    threads: Annotated[int, within(0)] = 0
    timeout: float = 60.0
    api_key_from: str = ""
    max_waiting: int = 1024
    deadline: float = 600.0
    updates: Path | None = None
    timeline: Path | None = None
    until_eof: Annotated[bool, typer.Option("--until-eof")] = False


@takes(ServeRequest)
def run(request: ServeRequest) -> None:
    """Serve a mixture-of-experts model with attention on some processes and experts on others.

    Answers /v1/completions, /v1/chat/completions, /v1/models, vLLM's /inference/v1/generate, /health and /metrics.

    Example: relibra serve runs/demo/policy --attention 1 --experts 1 --micro-batches 2 --port 8100
    """
    with missing_packages("relibra serve", INSTALL), uncollected_imports():
        from relibra.planning.deployment.deployment_files import read_expert_placement
        from relibra.serving.layout import WorkerLayout
        from relibra.serving.roles.checkpoint import count_positions, read_config
        from relibra.serving.server.serve import ServerSettings, serve

    inputs = [*named("--plan", request.plan), *named("--placement", request.placement)]
    check_outputs(named("--timeline", request.timeline), inputs)
    planned: dict[str, float] = {}
    if request.plan is not None:
        planned |= planned_workers(request.plan, request.model)
    placement = None if request.placement is None else read_expert_placement(request.placement)
    if placement is not None:
        given = {"experts": request.experts, "spare_experts": request.spare_experts}
        placed = {"experts": placement.workers, "spare_experts": placement.spare, "cap": placement.cap}
        for name, number in given.items():
            if number not in (None, placed[name]):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {number}: {request.placement} has {placed[name]}; leave the option out"
                )
        planned |= placed
    values = planned | {name: value for name, value in vars(request).items() if value is not None}
    positions = count_positions(read_config(request.model))
    values["max_length"] = request.max_length or min(WorkerLayout.max_length, positions or WorkerLayout.max_length)
    if positions is not None and values["max_length"] > positions:
        print_note(
            f"the model has {positions:,} positions, and --max-length allows more: answers beyond them are worse"
        )
    values["name"] = request.name or request.model.resolve().name

    def chosen(kind: type[Any]) -> Any:
        return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})

    layout = chosen(WorkerLayout)
    serve(
        request.model,
        layout,
        chosen(ServerSettings),
        placement=placement,
        dtype=request.dtype,
        threads=request.threads or max(1, len(os.sched_getaffinity(0)) // (layout.attention + layout.experts)),
        print_line=print_note,
    )
