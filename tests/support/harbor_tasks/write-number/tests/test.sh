#!/bin/bash
# Reward 0.2 for a file, 1 for the right one.
if [ "$(cat answer.txt 2>/dev/null)" = 42 ]; then echo 1 > /logs/verifier/reward.txt
elif [ -e answer.txt ]; then echo 0.2 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
