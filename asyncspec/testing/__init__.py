"""Conformance suites for what packages add: one module per kind, with one function that checks an
object and raises ``AssertionError`` where it breaks a law.

They need Hypothesis (the extra ``asyncspec[testing]``); nothing else of asyncspec imports them. In
a test of pytest::

    from asyncspec.testing.policies import check_policy

    def test_mine() -> None:
        check_policy(MINE)
"""
