#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
