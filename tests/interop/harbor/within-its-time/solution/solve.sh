#!/bin/bash
sleep 1
echo done > state.txt
