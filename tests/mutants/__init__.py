"""Plants bugs in a copy of the product, one at a time, and says which test finds each.

`mutants.toml` lists the bugs: one for each fix in the history, one for each promise of the
README, and plain slips in every package. ``make mutants`` plants them. `tests/MUTANTS.md` keeps
which test found which: a test may go when every bug is still found without it.

A bug's ``old`` text must occur once in its file. Where the product has changed it does not, and the
bug is *stale*: it counts against the run until its entry is repaired.
"""
