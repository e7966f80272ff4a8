#!/bin/bash
sed -i "s/total - n/total + n/" total.sh
