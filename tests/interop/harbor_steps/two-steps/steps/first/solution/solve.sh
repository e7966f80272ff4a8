#!/bin/bash
echo one > a.txt
