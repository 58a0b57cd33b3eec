"""`treadle verify RUN`: checks a finished run by its files and by computing its steps again."""
