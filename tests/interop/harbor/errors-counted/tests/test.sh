#!/bin/bash
if [ "$(cat count.txt 2> /dev/null)" = "$(grep -c error app.log)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
