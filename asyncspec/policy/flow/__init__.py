"""The policy ``flow`` and its model of rounds.

``policy`` grows trees and fills segments; ``memory`` holds what a draft node has learned and
chooses the shape of rounds. ``acceptance`` estimates chances, ``measured`` speeds; ``rounds`` rates
a shape, by the mean tree of ``mean_tree``. ``parameters`` holds the constants.
"""

from asyncspec.policy.flow.policy import FLOW

__all__ = ["FLOW"]
