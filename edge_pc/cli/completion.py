"""`edge-pc completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    \b
    bash:  edge-pc completion bash >> ~/.bashrc
    zsh:   edge-pc completion zsh >> ~/.zshrc
    fish:  edge-pc completion fish > ~/.config/fish/completions/edge-pc.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}", ctx)
    script = kind(ctx.find_root().command, {}, "edge-pc", "_EDGE_PC_COMPLETE")
    click.echo(script.source())
