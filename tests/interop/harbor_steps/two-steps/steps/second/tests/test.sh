#!/bin/bash
if [ "$(tail -n 1 a.txt 2> /dev/null)" = two ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
