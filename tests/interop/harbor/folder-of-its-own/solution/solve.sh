#!/bin/bash
[ "$PWD" = /workspace/lists ] && sort names.txt > sorted.txt
