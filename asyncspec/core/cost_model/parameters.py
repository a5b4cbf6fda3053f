"""The constants of the cost model, each with its unit and reason."""

from __future__ import annotations

from msgspec import Struct


class CostModelParameters(Struct, frozen=True):
    """Defaults are what the project runs with; docs/reference/policies.md and
    docs/results/limits.md have the measurements behind them."""

    # --- pass times of a stage ---

    # Least weight of a new pass in the moving average of its size.
    pass_weight: float = 0.1
    # Weight of a new pass in the moving average of how much longer than alone passes take: it
    # changes with the number of nodes at work.
    contention_weight: float = 0.25
    # Passes of a size before its average is reported, or errors are taken against it.
    min_passes: int = 8
    # Share by which an estimate has to change before it is reported again.
    report_change: float = 0.1
    # Weight of a new sample in a mean square of relative errors, and in an acceptance rate.
    error_weight: float = 1 / 256
    # Largest relative error that counts: one long pause is not a habit.
    max_error: float = 1.0
    # Most times the expected time that a measured one counts as, for the same reason.
    max_slowdown: float = 8.0

    # Rows of the passes tried when a stage is loaded, those first that say most; between them costs
    # are taken to be linear. Kernels for a lone row are others than those for two, so that two may
    # cost less than one, or twice as much; and where rows cost nothing up to 8 or 32, a line from 4
    # to 16 or from 16 to 64 would have them cost a third of what the most do.
    trial_rows: tuple[int, ...] = (1, 16, 4, 2, 64, 8, 32)
    # Seconds of trials after which no further size is tried, but always two: a large stage should
    # not take longer to try than to read, and its first passes tell the rest.
    trial_seconds: float = 1.0
    # Repetitions of a trial, where a pass takes fewer than so many seconds.
    trial_repeats: int = 3
    trial_repeat_seconds: float = 0.2

    # --- links ---

    # Bytes of a frame: the timing of smaller ones says more about timers and bursts.
    min_frame_bytes: int = 16 * 1024
    # Frames whose median counts, and those needed before there is an estimate. A sender that pauses
    # amid a frame makes no slow link, nor the burst after a rest that a shaped link lets through a
    # fast one.
    bandwidth_frames: int = 31
    min_bandwidth_frames: int = 5
    # Times its own cost that packing has to save before it is switched on; it is switched off below
    # once. Measured times are rough, and rows packed now and then would have times of their own.
    packing_gain: float = 2.0
    # Share of a tensor's bytes that packing saves (``asyncspec.backend.row_compression``).
    packing_saving: float = 0.3
    # Samples of which the quickest says what packing costs: other work only makes one slower.
    packing_trials: int = 8
    # Share of a pass: a link whose rows take less bounds no segment, and is not reported.
    min_link_share: float = 0.005
    # Share of the slowest stage's pass that a link may be busy with what the pass brings: at 1 it
    # is as slow as that stage, and with any jitter slower.
    link_utilization: float = 0.75
    # Weight of a round trip that is longer than the estimate; a shorter one replaces it. With more,
    # waits for processors that rounds share, or have too little time of, pass for long links.
    round_trip_weight: float = 1 / 64
    # Weight of a new sample in the mean round trip of one row: an answer has some tens.
    row_trip_weight: float = 1 / 16

    # --- rows of a segment ---

    # More rows than any policy puts in a segment.
    max_rows: int = 4096
    # Share of a segment's round trip that the transfers of its rows may add on all links. From .25
    # to .5 tokens a second are almost the same (docs/results/limits.md).
    transfer_share: float = 0.45
    # Share of the way through a stage and on to the next, at least of a pass of one row, by which
    # the passes of a session that is alone may be longer. From .1 to .33 tokens a second are almost
    # the same (docs/reference/policies.md).
    lone_session_delay: float = 0.25

    # --- batches at a stage ---

    # Passes that leave a segment waiting before it goes ahead of all that came later.
    max_skips: int = 2
    # Share of its own pass by which a joining segment may delay all that is in a pass, summed.
    join_delay: float = 0.25
    # Segments of a session that wait at the first stage by the time of its next pass: its window,
    # unless a cluster file names another.
    waiting_segments: int = 2
    # The same for another session's segment where the pass has its fair share of rows without it:
    # there it waits once, and from then on with others.
    oversize_delay: float = 0.5
    # Weight of a new sample in the mean time until a session's next segment, and mean deviations
    # beyond it by which the segment is there.
    return_weight: float = 0.25
    return_deviations: float = 1.0
    # Rounds for which sessions are expected to share passes once they do.
    sharing_rounds: float = 4.0

    # --- prompts ---

    # Rows of a prefill chunk: shorter ones read the weights too often.
    min_chunk_rows: int = 8
    # Share of the time until a prompt is read that shorter chunks must save: they read weights and
    # cache more often, and measured pass times are not quite steady.
    min_chunk_gain: float = 0.05
    # Seconds of a chunk's pass at the slowest stage, for which a new request may have to wait;
    # chunks of the usual size may take longer.
    max_chunk_seconds: float = 0.25
    # Times as long as without prefill chunks that a pass with answers in it may take (Sarathi).
    max_prefill_slowdown: float = 2.0
    # Tokens that a request waits for while another one reads them, for each that it need not read
    # itself then. More than 1: a prefix read once leaves room in passes.
    prefix_wait: int = 2

    # --- drafts ---

    # Most committed tokens of one draft request: four passes of a draft model, about as many as a
    # tree has levels.
    max_draft_tokens: int = 256
    # Most rows of a draft batch: tokens it takes in, and nodes of a level.
    max_draft_rows: int = 512
    # Most levels of one draft request, each a pass of the draft model that all sessions of the
    # batch wait for. No policy's defaults ask for more than 20; deeper trees take further requests.
    max_draft_levels: int = 32


PARAMETERS = CostModelParameters()

TINY = 1e-9
"""Seconds, or rows, in place of a divisor that may be 0."""
