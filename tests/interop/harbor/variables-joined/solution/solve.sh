#!/bin/bash
echo "$FIRST-$SECOND" > joined.txt
