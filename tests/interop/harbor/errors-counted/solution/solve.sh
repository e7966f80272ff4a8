#!/bin/bash
grep -c error app.log > count.txt
