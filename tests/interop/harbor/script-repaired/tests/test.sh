#!/bin/bash
# The script must be right for all inputs.
right=0
for numbers in "1 2 3" "10 0" "7"; do
  wanted=0
  for n in $numbers; do wanted=$((wanted + n)); done
  printf '%s\n' $numbers > numbers.txt
  [ "$(bash ./total.sh)" = "$wanted" ] && right=$((right + 1))
done
if [ $right = 3 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
