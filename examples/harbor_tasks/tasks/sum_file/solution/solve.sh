#!/bin/bash
paste -sd+ /app/numbers.txt | tr -d '\n' | { read -r sum; echo $((sum)); } > /app/answer.txt
