"""Options that several commands share, so that one name means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Backend = Annotated[str, typer.Option("--backend", help="Backends, comma list, or 'all'; see 'attn-graph backends'.")]
Mode = Annotated[str, typer.Option("--mode", help="Forward modes, comma list, or 'all'; see 'attn-graph backends'.")]
ArmList = Annotated[
    str,
    typer.Option(
        "--arm",
        help="Arms, comma list: names like fused-graph, or a part of one (fused, eager), or 'all' of ours. "
        "'sglang' adds the kernel of an installed SGLang (page tables, block tables of MLA, index lists).",
    ),
]
Implementations = Annotated[
    str | None,
    typer.Option(
        "--impl",
        help="Only arms of these implementations, comma list: aten, compile, fused, sglang. An engine's alone is shown "
        "beside ours.",
    ),
]
BatchSizes = Annotated[
    str | None, typer.Option("--bs", help="Requests per batch, comma list. Default: a small and a larger one.")
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        help="Context lengths in tokens, comma list: a number, uniform:LO:HI, loguniform:LO:HI, or lengths joined by "
        "+ that requests cycle through.",
    ),
]
PageSize = Annotated[
    str | None,
    typer.Option("--page-size", help="Tokens per page, comma list. Default: 64, or what the backend takes instead."),
]
MaxContext = Annotated[
    str | None, typer.Option("--max-context", help="Context limit of the tables in tokens, comma list.")
]
Swa = Annotated[
    bool | None,
    typer.Option(
        "--swa/--no-swa", help="With or without a sliding-window pool. Default: both, where the backend has both."
    ),
]
TopK = Annotated[str, typer.Option("--topk", help="Draft branches, comma list; speculative modes only.")]
DraftTokens = Annotated[
    str, typer.Option("--draft-tokens", help="Draft tokens per request, comma list; speculative modes only.")
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--tp",
        help="Tensor-parallel ranks, comma list: one GPU each where there are enough, else simulated: processes with "
        "cores of their own that share a device.",
    ),
]
GraphNodes = Annotated[
    str,
    typer.Option(
        "--graph-nodes", help="Kernels in the captured body, comma list of numbers, 'typical' (500) or 'large' (2876)."
    ),
]
GraphBranches = Annotated[str, typer.Option("--graph-branches", help="Streams the captured body runs on, comma list.")]
AllReduceAt = Annotated[
    int, typer.Option("--allreduce-at", min=0, help="Kernels in the captured body before the first all-reduce.")
]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Timed steps per arm.")]
Warmup = Annotated[int | None, typer.Option("--warmup", min=0, help="Steps before them, not recorded.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[int, typer.Option("--seed", help="Of lengths, tables and batches.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the results; made before anything runs. Default: results/<time>-<device>."),
]
Tuned = Annotated[bool, typer.Option("--tuned/--default", help="Use tuned block sizes where there are any.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
