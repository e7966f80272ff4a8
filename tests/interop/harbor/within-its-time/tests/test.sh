#!/bin/bash
# A command that never ends is ended by the tests themselves.
timeout 1 sleep 60
if [ "$(cat state.txt 2> /dev/null)" = done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
