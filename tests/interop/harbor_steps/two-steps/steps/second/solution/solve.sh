#!/bin/bash
echo two >> a.txt
