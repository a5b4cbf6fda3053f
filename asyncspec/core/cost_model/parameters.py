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

    # --- speculation (policy flow) ---

    # Weight of a new node in the sums that acceptance is estimated from: the last few hundred
    # tokens count, so that a change of the text shows.
    acceptance_weight: float = 1 / 256
    # Mean chances of a node's children before anything was observed, by rank, and the number of
    # nodes they count as: a middling draft.
    prior_acceptance: tuple[float, ...] = (0.6, 0.12, 0.06, 0.03, 0.02, 0.015, 0.01, 0.008)
    acceptance_prior: float = 1.0
    # Upper bounds of stated chances between which hits are counted apart. A quantised twin states
    # far less than comes true, and not by one factor for all.
    stated_bins: tuple[float, ...] = (0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
    # Nodes with which the rank's own correction counts in a bin, and hits as stated with which no
    # correction counts in a rank.
    bin_prior: float = 16.0
    correction_prior: float = 4.0
    # Weight of a token in the sums that say how far measured speeds are from expected ones, the
    # same of tokens of the other kind (with and without speculation), and the tokens with which the
    # expectation itself counts. Some thousand tokens after speculation was given up for being slow
    # it is tried again for about ten.
    speed_weight: float = 1 / 128
    other_speed_weight: float = 1 / 1024
    speed_prior: float = 4.0
    # Times what is laid out that is expected of a lone session's rounds of several segments: trees
    # grow again below hits, which no mean tree has. Fixed shapes had 1.0 to 1.23 of it. With others
    # their rows cost more than is laid out.
    regrowth: float = 1.12
    # Exponent of what slows rounds of one segment down in what slows those of several down, where
    # there are other sessions: these come back in step after such rounds, and wait for each other.
    session_slowdown: float = 0.5
    # Share of what was expected in the speed of rounds of one segment, up to which it is known.
    max_doubt: float = 0.25
    # Nodes at work from which longer passes are put down to their number, not to other programs.
    min_busy: float = 1.5
    # Weight of passes that take longer than before with fewer at work.
    alone_weight: float = 0.125
    # Tokens as which the number of processors known before counts beside what longer passes say.
    processors_prior: float = 64.0
    # Relative standard deviation of a round's time for a token.
    speed_deviation: float = 1.0
    # Nodes to be observed before the speed of speculation says more than how good the draft is.
    min_observed: int = 12
    # Times the expected time that measured tokens count as at most: one long pause is not a habit.
    max_slowdown: float = 8.0
    # Share of the time that drafts take which are not sent: they show whether the text has become
    # easier, and the draft node may share its cores. Most commits between two such drafts.
    probe_share: float = 0.03
    max_probe_interval: int = 16
    # Share of the least planned chance from which a node is worth its row: a planned tree is one of
    # mean chances.
    worthwhile_chance: float = 0.5
    # Least weight of a new call of the token source in the mean seconds of a level: the first ones
    # count alike. Where the draft node's processor time is bounded, they differ threefold.
    level_weight: float = 1 / 32
    # The same in what a further row of a level takes: it is the difference of noisy times.
    level_row_weight: float = 1 / 32
    # Tokens after which the shape of rounds is chosen anew: as many as before, within these bounds.
    # A search takes 1 to 70 ms of the draft node's time, and verdicts wait for it.
    min_replan_tokens: int = 4
    max_replan_tokens: int = 96
    # Share by which the number of sessions has to change for that to be sooner: where requests come
    # and go all the time, searches would take more of the draft node's time than all else.
    min_sessions_change: float = 0.2
    # Nodes of a session's tree, by stages: admission counts them, so a short pipeline's has no more
    # than its segments need. With 512 a draft right at 97 % on sixteen stages and links of 1.5
    # passes had .72 of its speed; with 4,096 it has 1.003 of that with 128 a stage.
    tree_nodes_a_stage: int = 128
    min_tree_nodes: int = 512
    # Bounds of a planned round: later segments and less likely nodes change its rate by less than a
    # percent, and levels are not all hit for ever.
    max_planned_segments: int = 24
    min_planned_chance: float = 1e-3
    max_level_hits: float = 0.98

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
