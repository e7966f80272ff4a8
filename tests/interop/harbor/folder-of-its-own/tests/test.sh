#!/bin/bash
if sort names.txt | cmp -s - sorted.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
