"""Estimates of the memory that runs take, and a check against the free memory."""

from collections.abc import Sequence

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.memory import check_device, format_bytes, free_on

_WORKER_BYTES = 5 * 2**27  # of a process that has imported everything and trained nothing
_FLOAT = 4
_EVALUATED_AT_ONCE = 2048  # sequences, without gradients


def check_memory(needed_bytes: int, device: str, jobs: int = 1) -> None:
    """Refuse runs that do not fit in the free memory, before work starts.

    If the free memory is unknown, no run is refused.

    Args:
        needed_bytes: what one run takes, as :func:`run_bytes` estimates it.
        device: where runs train, as PyTorch names it; the memory of others than CUDA's is the
            machine's.
        jobs: runs at a time, each in a process of its own if there are several.

    Raises:
        InfoFlowError: with what is needed and what is free; or for a device that is not there.
    """
    check_device(device)
    needed = needed_bytes * jobs
    if jobs > 1:
        needed += _WORKER_BYTES * jobs
    free = free_on(device)
    if free is None or needed <= free:
        return
    runs = f"{jobs} runs at a time need" if jobs > 1 else "a run needs"
    fewer = "fewer jobs, or " if jobs > 1 else ""
    raise InfoFlowError(
        f"{runs} about {format_bytes(needed)} of memory on {device}, but {format_bytes(free)} is "
        f"free: expected it to fit; choose {fewer}a smaller preset"
    )


def run_bytes(
    *,
    n_train: int,
    n_tokens: int,
    d_token: int,
    batch_size: int,
    d_model: int,
    heads: Sequence[int],
    d_head: int | None = None,
    d_mlp: int = 0,
    d_encoder: int = 0,
) -> int:
    """Return an upper estimate, in bytes, of the peak memory of a training run of a hosted model.

    It counts three copies of the training sequences (drawn, converted, on the device); the weights
    with gradients, moments and kept states; and the larger of two numbers: what a step keeps for
    its gradient, and what the largest layer takes in an evaluation. The last layer has one query
    only. Intermediate data of a task and probes are not counted.

    Args:
        n_train: training sequences.
        n_tokens: their length, T.
        d_token: numbers in a token; 2 for token ids, which are long integers.
        batch_size: sequences in a step.
        d_model: width of the residual stream.
        heads: of every layer.
        d_head: dimension of a head; default, heads share `d_model`.
        d_mlp: width of the feed-forward networks; 0 for none.
        d_encoder: hidden width of the encoder; 0 for a linear one.
    """
    n_pos = n_tokens + 1
    widths = [max(d_model, h * d_head) if d_head else d_model for h in heads]
    # numbers for each sequence: states, queries, keys, values and outputs, and the scores
    layers = [
        n_pos * (3 * d_model + 4 * width + 2 * d_mlp + 4 * h * n_pos)
        for h, width in zip(heads, widths, strict=True)
    ]
    layers[-1] = n_pos * (3 * d_model + 2 * widths[-1] + 4 * heads[-1])
    # the encoder counts as a layer, though without attention
    layers.append(n_pos * (2 * d_encoder + d_model))
    step = batch_size * (sum(layers) + max(layers))
    evaluation = _EVALUATED_AT_ONCE * max(layers)
    data = 3 * n_train * (n_tokens * d_token + 1)
    weights = 6 * sum(d_model * (4 * width + 2 * d_mlp) for width in widths)
    return _FLOAT * (data + weights + max(step, evaluation))
