#!/bin/bash
# The variables of the image, the environment and the verifier are all there.
if [ "$(cat joined.txt 2> /dev/null)" = "$WANTED" ] && [ "$FIRST-$SECOND" = "$WANTED" ]; then
  echo 1.0
else
  echo 0.0
fi > /logs/verifier/reward.txt
