#!/bin/bash
if [ "$(cat a.txt 2> /dev/null)" = one ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
