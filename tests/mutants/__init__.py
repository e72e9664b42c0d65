"""Plants bugs in a copy of the product, one at a time, and reports which test finds each.

`mutants.toml` lists them: a bug for each fix in the history, for each promise of the README, and
plain slips in every package. ``make mutants`` plants them. `tests/MUTANTS.md` keeps which test
found which: a test may be deleted if every bug is still found.

A bug's ``old`` text must occur once in its file. If a change of the product removes it, the bug is
*stale*: the run fails until the entry is repaired.
"""
