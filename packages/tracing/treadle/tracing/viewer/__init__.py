"""`treadle view`: a page, served on loopback, that shows runs while they train.

`runs` opens run directories, `metric_lines` reads what was appended to a metrics log, `timeline`
divides the time of a step, `trajectory` reads lists and single trajectories, `token_text`
cuts text into tokens, `app` answers the page, and `command` listens. `static/` has the page. Needs
the extra `viewer`, but for `arguments`.
"""
