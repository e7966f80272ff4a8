#!/bin/bash
# Several scores; the one named `reward` counts.
has_in=0
has_out=0
[ -f in/seed.txt ] && has_in=1
[ -d out ] && has_out=1
echo "{\"folders\": $((has_in + has_out)), \"reward\": $((has_in * has_out))}" > /logs/verifier/reward.json
