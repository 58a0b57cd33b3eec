#!/bin/bash
python3 -c "print(*reversed(open('line.txt').read().split()))" > reversed.txt
