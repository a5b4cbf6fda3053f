"""The constants of ``flow``, each with its unit and reason."""

from __future__ import annotations

from msgspec import Struct


class FlowParameters(Struct, frozen=True):
    """Defaults are what the project runs with; docs/reference/policies.md and
    docs/results/limits.md have the measurements behind them."""

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
    # Share of the time that drafts take which are not sent: they show whether the text has become
    # easier, and the draft node may share its cores. Most commits between two such drafts. Both
    # until so many nodes were observed, and from then on.
    early_probe_share: float = 0.03
    max_early_probe_interval: int = 16
    early_nodes: int = 8
    probe_share: float = 0.01
    max_probe_interval: int = 64
    # Processor time of the draft node's own work around a draft (views, merging, learning, the way
    # to the device's thread and back), which no measured call holds.
    handling_seconds: float = 5e-4
    # Share of the least planned chance from which a node is worth its row: a planned tree is one of
    # mean chances.
    worthwhile_chance: float = 0.5
    # Least weight of a new call of the token source in the mean seconds of a level: the first ones
    # count alike. Where the draft node's processor time is bounded, they differ threefold.
    level_weight: float = 1 / 32
    # The same in what a further row of a level takes: it is the difference of noisy times.
    level_row_weight: float = 1 / 32
    # Least share by which speculation has to be faster than plain decoding to be chosen: what is
    # expected is rarely closer, and nodes that share processors pay for every row.
    min_gain: float = 0.05
    # Tokens after which the shape of rounds is chosen anew: as many as before, within these bounds.
    # A search takes 1 to 70 ms of the draft node's time, and verdicts wait for it.
    min_replan_tokens: int = 4
    max_replan_tokens: int = 96
    # The same at most while the share of what was expected in the speed of the chosen kind of
    # rounds is larger than that: a trial that fails should not last 96 tokens.
    trial_tokens: int = 24
    trial_doubt: float = 0.1
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


FLOW_PARAMETERS = FlowParameters()
