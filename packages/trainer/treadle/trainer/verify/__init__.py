"""`treadle verify RUN`: whether a finished run is what it says."""
