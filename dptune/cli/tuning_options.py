"""Options that `dptune tune` and `dptune suggest` share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dptune.cli.catalogue import completions

Alpha = Annotated[int, typer.Option(help="Of LoRA.")]
BatchUnits = Annotated[float | None, typer.Option(help="Expected units of a batch.")]
Completion = Annotated[str | None, typer.Option(help="Column of completions.")]
DeltaOrNone = Annotated[float | None, typer.Option(help="Of the guarantee, below 1 over the units.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda:0; else a GPU where there is one.")]
Dtype = Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Of the frozen weights.")]
Passes = Annotated[float | None, typer.Option(help="Passes over the units.")]
Epsilon = Annotated[float, typer.Option(help="The budget, certified.")]
LossOn = Annotated[Literal["completion", "assistant", "all"] | None, typer.Option(help="What is learned.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens of a record.")]
MechanismName = Annotated[str, typer.Option(help="See `dptune mechanisms`.", autocompletion=completions)]
Messages = Annotated[str | None, typer.Option(help="Column of chats.")]
Model = Annotated[str, typer.Option(help="Folder of a checkpoint, or a hub id with --revision.")]
Prompt = Annotated[str | None, typer.Option(help="Column of prompts, which have no loss.")]
Rank = Annotated[int, typer.Option(help="Of LoRA.")]
RecordsPerUnit = Annotated[int, typer.Option(help="Most records of a unit in a batch.")]
Revision = Annotated[str | None, typer.Option(help="40-digit commit of a hub id.")]
Rows = Annotated[int, typer.Option(help="Of a micro-batch: memory and speed only.")]
Seed = Annotated[int, typer.Option(help="Of the adapters' start; public.")]
TargetModules = Annotated[str | None, typer.Option(help="Linear layers, by commas, or all-linear.")]
Template = Annotated[str | None, typer.Option(help="Text with columns in braces: '{age} years'.")]
Text = Annotated[str | None, typer.Option(help="Column of texts.")]
