"""`treadle data`: data sets as they are published -> rows with verl's columns.

`sets` has their names, files and functions; `gsm8k`, `geometry3k`, `boxed_math` (DAPO-Math-17k and
AIME) and `retool_sft` make one row each; `convert` finds, converts and writes.
"""
